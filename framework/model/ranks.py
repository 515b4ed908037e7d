"""The processes of a tensor-parallel engine on the CPUs of one machine.

The engine's own process is rank 0: it schedules, samples, and sends what every step computes to the others, which hold
their shares of weights and KV cache and meet it in each layer's sums. A rank that ends takes the run with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedlab.framework.batch import Inputs
from schedlab.framework.errors import SchedlabError
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.executor import BlockPairs, ModelExecutor
from schedlab.framework.model.tensor_parallel import KEY, Group, Shard, check_split

SECONDS_TO_END = 5.0
SOURCES = str(Path(__file__).parents[3])
COMMAND = "import sys; from schedlab.framework.model.ranks import serve; serve(int(sys.argv[1]))"


class TensorParallelExecutor(ModelExecutor):
    """Rank 0 of `tensor_parallel`, at least 2; starts the others and sends them what it does.

    `options` are ModelExecutor's. Memory is each rank's: a block holds the keys and values of its own heads.
    SchedlabError, with what it said, once a rank has ended.
    """

    def __init__(self, config: ModelConfig, *, tensor_parallel: int, **options: Any) -> None:
        check_split(config, tensor_parallel, options.get("weight_dtype"))
        self._peers = [Peer(rank) for rank in range(1, tensor_parallel)]
        self._folder = tempfile.TemporaryDirectory(prefix="schedlab-ranks-")
        self.close = weakref.finalize(self, _end, self._peers, self._folder)
        """Ends the other ranks; at the latest when this executor or its process ends."""
        meeting = str(Path(self._folder.name) / "meeting")
        for peer in self._peers:
            peer.wait()
            peer.send(config, Shard(peer.rank, tensor_parallel), meeting, options)
        with self._naming_the_lost():
            super().__init__(config, group=Group(Shard(0, tensor_parallel), meeting), **options)
        for peer in self._peers:
            peer.wait()

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int, max_num_seqs: int) -> None:
        """As much on every rank, all of it in one machine's memory."""
        ranks = 1 + len(self._peers)
        needed = ranks * (num_blocks + num_host_blocks) * self.block_bytes(block_size)
        blocks = f"{num_blocks} blocks and {num_host_blocks} host blocks on each of {ranks} ranks"
        self._require(needed, f"engine.num_blocks: {blocks} need", self._device)
        self._send("allocate", num_blocks, block_size, num_host_blocks, max_num_seqs)
        super().allocate(num_blocks, block_size, num_host_blocks, max_num_seqs)

    def copy_blocks(self, copies_out: BlockPairs, copies_in: BlockPairs) -> None:
        if copies_out or copies_in:
            self._send("copy_blocks", copies_out, copies_in)
        super().copy_blocks(copies_out, copies_in)

    def logits(self, inputs: Inputs) -> Tensor:
        self._send("logits", replace(inputs, requests=[]))
        with self._naming_the_lost():
            return super().logits(inputs)

    def _send(self, *message: Any) -> None:
        for peer in self._peers:
            peer.send(*message)

    @contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        """A sum fails where a rank has closed its end; which one, and why, is said on its own line to this process."""
        try:
            yield
        except RuntimeError:
            for peer in self._peers:
                if peer.has_ended():
                    raise peer.lost() from None
            raise


class Peer:
    """Another rank's process, and the connection to it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, (SOURCES, os.environ.get("PYTHONPATH"))))
        with theirs:
            self.process = subprocess.Popen(  # -P: nothing of the current folder is imported
                [sys.executable, "-P", "-c", COMMAND, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip
        self.connection = Connection(ours.detach())

    def send(self, *message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self.lost() from None

    def wait(self) -> None:
        """Until the rank has done what it was sent so far."""
        try:
            failure = self.connection.recv()
        except EOFError:
            raise self.lost() from None
        if failure is not None:
            raise SchedlabError(f"{KEY}: rank {self.rank} ended: {failure}")

    def has_ended(self) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_END)
        return self.process.poll() is not None

    def lost(self) -> SchedlabError:
        """What the rank said before it ended, or how it ended."""
        said = None
        with suppress(EOFError, OSError):
            while said is None:
                said = self.connection.recv()
        if said is None:
            code = self.process.wait(SECONDS_TO_END)
            said = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return SchedlabError(f"{KEY}: rank {self.rank} ended: {said}")


def _end(peers: list[Peer], folder: tempfile.TemporaryDirectory[str]) -> None:
    for peer in peers:
        peer.connection.close()
    for peer in peers:
        with suppress(subprocess.TimeoutExpired):
            peer.process.wait(SECONDS_TO_END)
        peer.process.kill()
        peer.process.wait()
    folder.cleanup()


def serve(descriptor: int) -> None:
    """The life of a rank other than 0: what rank 0 sends is done in order, until its end of the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt reaches all of a terminal's processes; rank 0 ends us
    connection = Connection(descriptor)
    try:
        connection.send(None)
        config, shard, meeting, options = connection.recv()
        executor = ModelExecutor(config, group=Group(shard, meeting), **options)
        connection.send(None)
        while True:
            name, *arguments = connection.recv()
            with torch.inference_mode():
                getattr(executor, name)(*arguments)
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # whatever it is, rank 0 says it
        with suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}" if not isinstance(error, SchedlabError) else str(error))
        sys.exit(1)
