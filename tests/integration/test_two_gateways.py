"""Two gateways of one service: whatever a client begins at one goes on at the other."""

import pytest

from rollout.client import Client, RolloutError
from rollout.schema import RolloutRequest
from services.state.fleet import FleetStore
from tests.helpers.gateways import started_gateway
from tests.helpers.keys import http
from tests.helpers.stack import Stack, free_port
from workers.handlers.noop import Noop
