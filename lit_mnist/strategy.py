"""DDP whose ranks meet before they form a process group, and are watched from then on."""

import atexit
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch marks none as exported

from lit_mnist import hosts, launch
from lit_mnist.desk import Desk
from lit_mnist.errors import RunError, UserError, complain, one_line
from lit_mnist.peers import Peers
from lit_mnist.surroundings import run_name
from lit_mnist.wire import Meeting, Member

# Collectives wait a little longer than the peers do, who know who is missing.
_LONGER = timedelta(seconds=5)
_PORT_KEY = "lit-mnist/desk"
_NAMES: dict[str, dict[str, bool]] = {
    "ddp": {},
    "ddp_find_unused_parameters_false": {"find_unused_parameters": False},
    "ddp_find_unused_parameters_true": {"find_unused_parameters": True},
}


class WatchedDDP(DDPStrategy):
    """Lightning's `DDPStrategy` with a bound on every wait for another rank, and words for what is waited for.

    Args:
        timeout: The bound.
        on_met: Called with the connection to the other ranks as soon as all have met; it has to part from them. None:
            the strategy does so itself, when the process exits.
        kwargs: Of `DDPStrategy`; `gradient_as_bucket_view` is True unless said otherwise.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(minutes=2),
        on_met: Callable[[Peers], None] | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs = {"gradient_as_bucket_view": True, **kwargs}  # spares a copy of the gradients a step
        super().__init__(timeout=timeout + _LONGER, **kwargs)
        self._bound = timeout
        self.on_met = on_met or self._part_at_exit
        self._peers = Peers()  # those to part from

    def setup_distributed(self) -> None:
        """Meet the other ranks, then form the process group over a store that rank 0 offers.

        The store is new each time: torchrun's own outlives a restart, and ranks that read in it the addresses of the
        attempt before would wait for the dead.
        """
        self.set_world_ranks()
        if not dist.is_initialized():
            try:
                store = self._meet()
            except (RunError, UserError):
                if self.launcher:  # it has started the other processes of this host, one of which may be frozen
                    self.launcher.kill(signal.SIGKILL)
                raise
            dist.init_process_group(
                launch.backend(self),
                store=store,
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._bound + _LONGER,
                device_id=None if self.root_device.type == "cpu" else self.root_device,
            )
        super().setup_distributed()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Say where this rank is."""
        self._peers.at(f"batch {batch_idx}")
        super().on_train_batch_start(batch, batch_idx)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, so that they end too."""
        if not self._peers.is_alone:
            if is_of_another_rank(exception):
                complain(self._peers.explain(one_line(str(exception))))
            self._peers.fail(one_line(f"{type(exception).__name__}: {exception}"), is_said=True)
        super().on_exception(exception)

    def _part_at_exit(self, peers: Peers) -> None:
        self._peers = peers
        atexit.register(peers.part)

    def _meet(self) -> TCPStore:
        environment = self.cluster_environment
        assert environment is not None
        rank, devices = self.global_rank, self.num_processes
        host, port = environment.main_address, environment.main_port
        agents = _agents_store(host, port, self._bound) if isinstance(environment, TorchElasticEnvironment) else None
        meeting = Meeting(
            world_size=self.world_size,
            bound=self._bound.total_seconds(),
            run=run_name(os.environ),
            address=lambda: _address(host, port, agents),
            place=lambda missing: hosts.place(missing, devices, os.environ),
            judge=hosts.differences,
        )
        store = desk = None
        if rank == 0:
            if agents is None:
                hosts.require_own_address(host)
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=self._bound)
            desk = Desk(meeting, 0 if agents else port, store.port)
            desk.start()
            if agents:
                agents.set(_PORT_KEY, str(desk.port))
        facts = hosts.facts(devices, launch.backend(self))
        peers = Peers.meet(Member.this(rank, facts), meeting, desk)
        self.on_met(peers)
        assert peers.store
        return store or TCPStore(*peers.store, is_master=False, timeout=self._bound)


def is_of_another_rank(error: BaseException) -> bool:
    """Whether it is another rank's failure, as a collective shows it: gloo raises bare RuntimeErrors."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "/gloo/" in str(error))


def require_processes_of_their_own(strategy: Any) -> None:
    """Refuse the strategies whose processes do not run this command, but are copies of one that does.

    Args:
        strategy: `--trainer.strategy` as given.

    Raises:
        UserError: If it is one of them.
    """
    if isinstance(strategy, str) and strategy.endswith(("_spawn", "_fork", "_notebook")):
        raise UserError(f"trainer.strategy={strategy} is for notebooks: use --trainer.strategy ddp")


def watch_ddp(strategy: Any, timeout: timedelta, on_met: Callable[[Peers], None]) -> bool:
    """Let `--trainer.strategy ddp` and its kin, and what Lightning chooses for several devices, be `WatchedDDP`.

    Args:
        strategy: `--trainer.strategy` as given.
        timeout: The bound on every wait.
        on_met: See `WatchedDDP`.

    Returns:
        Whether `strategy` is one of them.
    """
    if isinstance(strategy, WatchedDDP):
        strategy.on_met = on_met
        return True
    for name, options in _NAMES.items():
        StrategyRegistry.register(
            name, WatchedDDP, "DDP, watched", override=True, timeout=timeout, on_met=on_met, **options
        )
    return strategy == "auto" or strategy in _NAMES


def _agents_store(host: str, port: int, bound: timedelta) -> TCPStore | None:
    """The store of torchrun's agents, where they have one: it has MASTER_PORT, and rank 0's desk another."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return TCPStore(host, port, is_master=False, timeout=bound)


def _address(host: str, port: int, agents: TCPStore | None) -> tuple[str, int] | None:
    if agents is None:
        return host, port
    try:
        return (host, int(agents.get(_PORT_KEY))) if agents.check([_PORT_KEY]) else None
    except dist.DistError:
        return None  # the agent is gone
