"""gunicorn for the gateway: `gunicorn -c deploy/gunicorn.conf.py 'services.gateway.app:create_app()'`."""

from pathlib import Path

from services.gateway.compat.port import Compat
from services.settings import settings

bind = [f"{settings().gateway_host}:{settings().gateway_port}"]
if compat := Compat.of(settings()):
    bind.append(compat.address)
# One process: the metrics' counters live in it.
workers = 1
worker_class = "services.gateway.parking.ParkingWorker"
threads = settings().gateway_threads
worker_connections = settings().gateway_waiters + 1000
backlog = 2048
keepalive = 75  # seconds; longer than a client's pause between two calls
graceful_timeout = 5  # seconds that requests under way get when it ends; a client tries its long-poll again
# The heartbeat file must not wait for a busy disk.
worker_tmp_dir = "/dev/shm" if Path("/dev/shm").is_dir() else None
control_socket_disable = True  # gunicorn 27 would put one into $HOME, shared by all stacks
errorlog = "-"
loglevel = settings().log_level.lower()
