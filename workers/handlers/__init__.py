"""Handlers: one file a domain. `base.py` is the interface."""

from workers.handlers.base import AgentHandler, Context, EvalContext, InitContext, Reward, RunContext

__all__ = ["AgentHandler", "Context", "EvalContext", "InitContext", "Reward", "RunContext"]
