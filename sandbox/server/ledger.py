"""Numbered requests: each is carried out once, whoever asks again, so that another worker can go on here.

Workers take a sandbox over under ever higher fences. The outcome of a numbered operation is kept until a
request says that it is known, and the operation goes on when its client is gone: the next worker asks the
same again and is given the same. `abandon` ends it as the end of the connection ends any other.
"""

import json
import socket
import threading
import time

from errors import Ahead, ServerError, Taken


class Ledger:
    """The numbered operations of a sandbox that run, or whose outcomes are not known yet."""

    def __init__(self):
        self._lock = threading.Lock()  # guards all below, and is never held while an operation runs
        self._fence = 0
        self._last = 0
        self._known = 0
        self._operations = {}
        self._abandoned = set()  # numbers whose requests may still come
        self._lines = []  # pairs of sockets that no operation has hung up

    def answer(self, request, carry_out):
        """The reply to a request with `number`, `fence` and `known`; `carry_out(request, connection)` makes
        it, unless the number has been seen. Raises Taken, Ahead.
        """
        request = dict(request)
        number, fence, known = (int(request.pop(name)) for name in ("number", "fence", "known"))
        with self._lock:
            self._heed(fence)
            self._forget(known)
            operation = self._operations.get(number)
            new = operation is None and number > self._known
            if new:
                line = self._lines.pop() if self._lines else socket.socketpair()
                operation = self._operations[number] = _Operation(request, line)
                self._last = max(self._last, number)
                if number in self._abandoned:
                    operation.abandon()
        if operation is None or not operation.is_of(request):
            raise Ahead(
                "the sandbox has gone on beyond what its record says: operation %d was another one, or its "
                "outcome is not kept any more; begin anew in a new sandbox" % number
            )
        if new:
            try:
                operation.reply = carry_out(operation.request, operation.line[0])
            finally:
                with self._lock:
                    self._lines += operation.end()
        operation.ended.wait()
        return operation.reply

    def op_take(self, request, connection):
        """From now on only this fence and higher ones are heeded."""
        with self._lock:
            self._heed(int(request["fence"]))
            return {"last": self._last, "known": self._known}

    def op_abandon(self, request, connection):
        """End an operation as if its client had hung up; also one whose request is still on its way."""
        number = int(request["number"])
        with self._lock:
            self._heed(int(request["fence"]))
            if number in self._operations:
                self._operations[number].abandon()
            elif number > self._known:
                self._abandoned.add(number)
        return {}

    def settle(self, wait_s, patience_s):
        """Wait until no operation runs; those that do after `wait_s` are abandoned. Raises ServerError when
        one goes on for `patience_s` more.
        """
        deadline = time.monotonic() + wait_s
        with self._lock:
            running = {n: each for n, each in self._operations.items() if not each.ended.is_set()}
        for operation in running.values():
            operation.ended.wait(max(0, deadline - time.monotonic()))
        with self._lock:
            for operation in running.values():
                operation.abandon()
        deadline = time.monotonic() + patience_s
        for number, operation in running.items():
            if not operation.ended.wait(max(0, deadline - time.monotonic())):
                raise ServerError("operation %d was abandoned and goes on all the same" % number)

    def state(self):
        """For :meth:`seed` of another sandbox. Nothing may run."""
        with self._lock:
            ended = {n: each for n, each in self._operations.items() if each.ended.is_set()}
            kept = [[number, operation.digest(), operation.reply] for number, operation in ended.items()]
            counts = {"fence": self._fence, "last": self._last, "known": self._known}
            return dict(counts, outcomes=kept, abandoned=sorted(self._abandoned))

    def seed(self, state):
        """Go on where another sandbox's ledger was. Not its fence: nobody who held an older claim was given
        this sandbox, and those of a fork begin anew. Returns whether that was possible: nothing was numbered.
        """
        with self._lock:
            if self._last or self._fence:
                return False
            self._last, self._known = state["last"], state["known"]
            self._abandoned = set(state["abandoned"])
            for number, digest, reply in state["outcomes"]:
                operation = self._operations[number] = _Operation(None, None)
                operation.of, operation.reply = digest, reply
                operation.ended.set()
            return True

    def _heed(self, fence):
        if fence < self._fence:
            raise Taken(
                "another worker has taken the sandbox over, under fence %d; fence %d must leave it alone"
                % (self._fence, fence)
            )
        self._fence = fence

    def _forget(self, known):
        """Drop the outcomes that the caller's record has. What runs stays, to be abandoned."""
        self._known = known = max(self._known, known)
        kept = self._operations.items()
        self._operations = {number: one for number, one in kept if number > known or not one.ended.is_set()}
        self._abandoned = {number for number in self._abandoned if number > known}


class _Operation:
    """A request and, once it has `ended`, its reply."""

    def __init__(self, request, line):
        """`line`: two sockets. The first is in the place of the client's connection, whose end the operation
        would take as an interrupt.
        """
        self.request = request
        self.of = None
        """Instead of the request, of one that another sandbox has carried out: its digest."""
        self.reply = {"ok": False, "error": {"type": "SandboxError", "message": "the operation broke off"}}
        self.ended = threading.Event()
        self.line = line
        self._hung_up = False

    def digest(self):
        """Of its request, which may be as large as a file."""
        return self.of or _digest(self.request)

    def is_of(self, request):
        """Whether it is this request's."""
        return self.of == _digest(request) if self.of else self.request == request

    def abandon(self):
        """Hang up, also where a process that is just being started has our end, too."""
        if not self.ended.is_set():
            self._hung_up = True
            self.line[1].shutdown(socket.SHUT_RDWR)

    def end(self):
        """Say that the reply is there; the line, if another operation can have it."""
        self.ended.set()
        if not self._hung_up:
            return [self.line]
        for end in self.line:
            end.close()
        return []


def _digest(request):
    import hashlib  # of rare use here

    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
