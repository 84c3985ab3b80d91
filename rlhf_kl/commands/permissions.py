"""Permissions to run other people's code, given on the command line, for commands that open a run's folder."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_kl.config.load import load_run_config
from rlhf_kl.config.plugins import plugins_of
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.run.folder import RunFolder


@dataclass(frozen=True)
class Permissions:
    """Permissions that the command line gives; those in the folder's config do not count."""

    plugins: bool = False
    remote_code: bool = False
    pickle: bool = False

    def run_config(self, folder: RunFolder) -> TrainConfig:
        """The config of a run with these permissions and no others. Errors: InputError if there is no run."""
        if not folder.config.is_file():
            raise InputError(f"{folder.path}: holds no run (no config.yaml)")
        config = load_run_config(folder.config, plugins=self.plugins)
        return self._put_into(config, remote_code=self.remote_code, pickle=self.pickle)

    def added_to(self, config: TrainConfig) -> TrainConfig:
        """A config that the user chose, with these permissions beside its own."""
        run = config.run
        remote_code, pickle = self.remote_code or run.trust_remote_code, self.pickle or run.allow_pickle
        return self._put_into(config, remote_code=remote_code, pickle=pickle)

    def _put_into(self, config: TrainConfig, *, remote_code: bool, pickle: bool) -> TrainConfig:
        allowed = {"trust_remote_code": remote_code, "allow_pickle": pickle}
        return config.model_copy(update={"run": config.run.model_copy(update=allowed)})

    def refused(self, config: TrainConfig) -> tuple[list[str], list[str]]:
        """The plugins that have no permission: those for scores, and those for gold scores."""
        found = {plugin.key: plugin.ref for plugin in plugins_of(config) if plugin.key.startswith("reward.")}
        gold = found.pop("reward.gold", None)
        return ([], []) if self.plugins else (list(found.values()), [gold] if gold else [])


NO_PERMISSIONS = Permissions()
