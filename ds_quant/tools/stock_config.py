"""DeepSpeed's own checks of a config, without a launcher, a process group or a model.

DeepSpeed is imported when it is asked.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import ValidationError

from ds_quant.config.errors import KEY, show

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu")
_NOT_ASKED = "its own checks of this file were not made"
_NO_BATCH = (
    "neither train_batch_size nor train_micro_batch_size_per_gpu is set: DeepSpeed needs one of "
    "them, unless a Trainer gives it"
)


class RefusedByDeepSpeed(ValueError):
    """DeepSpeed itself refuses the config."""


def is_installed() -> bool:
    """Return True if DeepSpeed can be imported."""
    return importlib.util.find_spec("deepspeed") is not None


def check(param_dict: Mapping[str, Any], *, world: int | None) -> list[str]:
    """Build DeepSpeed's config of a file, and return notes on what was not checked.

    world: number of ranks, None if unknown; batch sizes are then checked for any number.

    Raises:
        RefusedByDeepSpeed: with DeepSpeed's reason.
    """
    if not is_installed():
        return [f"DeepSpeed is not installed here: {_NOT_ASKED}"]
    # Disabled: hooks of the plugin would import the user's codecs.
    settings = {**_without_auto(param_dict), KEY: {"enabled": False}}
    notes = []
    if not any(key in settings for key in _BATCH_KEYS):
        settings["train_micro_batch_size_per_gpu"] = 1
        if not any(key in param_dict for key in _BATCH_KEYS):
            notes.append(_NO_BATCH)
    with _quiet():
        try:
            import deepspeed
        except Exception as error:  # an installation may be broken in any way
            return [f"DeepSpeed cannot be imported ({_in_one_line(error)}): {_NOT_ASKED}"]
        world = world or _fitting_world(settings)
        try:
            config = _build(settings, world)
        except Exception as error:  # its checks raise errors of many types
            reason = _reason(error, settings, world)
            raise RefusedByDeepSpeed(
                f"DeepSpeed {deepspeed.__version__} refuses this config: {reason}"
            ) from error
    for reason in _refused_by_its_optimizers(config):
        raise RefusedByDeepSpeed(f"DeepSpeed {deepspeed.__version__} refuses this config: {reason}")
    return notes


def _without_auto(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that a Trainer fills in, at any depth."""
    kept = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            kept[key] = _without_auto(value)
        elif value != "auto":
            kept[key] = value
    return kept


def _fitting_world(settings: Mapping[str, Any]) -> int:
    """Return a number of ranks for which the batch sizes add up, if there is one; else 1."""
    batch = _size(settings.get("train_batch_size"))
    micro_batch = _size(settings.get("train_micro_batch_size_per_gpu"))
    accumulation = _size(settings.get("gradient_accumulation_steps"))
    if not (batch and micro_batch and accumulation):
        return 1
    return max(1, batch // (micro_batch * accumulation))


def _size(value: object) -> int:
    """Return a size that a config gives, 0 for anything else."""
    return value if isinstance(value, int) and value > 0 else 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed from logging, and from choosing an accelerator by installed packages."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)


def _build(settings: dict[str, Any], world: int) -> Any:
    """Return DeepSpeed's config of a run of ``world`` ranks."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class Config(DeepSpeedConfig):
        """The config with a given number of ranks, in place of that of a process group."""

        def _configure_train_batch_size(self) -> None:
            self.world_size = world
            super()._configure_train_batch_size()

    return Config(settings)


def _reason(error: Exception, settings: dict[str, Any], world: int) -> str:
    """Return the message of an error in one line; pydantic's with the section of the key."""
    if not isinstance(error, ValidationError):
        return _in_one_line(error)
    sentences = []
    for mistake in error.errors(include_url=False):
        location = [str(part) for part in mistake["loc"]]
        path = ".".join([*_section_with(location[:1], settings, world), *location])
        sentences.append(f"{path}={show(mistake['input'])}: {mistake['msg']}")
    return "; ".join(sentences)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _section_with(key: list[str], settings: dict[str, Any], world: int) -> list[str]:
    """Return the section whose key pydantic refuses: without it the error is another one.

    key, and the section: a list of one name, or empty.
    """
    for name, section in settings.items():
        if not isinstance(section, dict) or not key or key[0] not in section:
            continue
        others = {other: value for other, value in section.items() if other != key[0]}
        try:
            _build({**settings, name: others}, world)
        except ValidationError as error:
            if any(str(mistake["loc"][0]) == key[0] for mistake in error.errors()):
                continue
        except Exception:  # another check of DeepSpeed's
            return [name]
        return [name]
    return []


def _refused_by_its_optimizers(config: Any) -> Iterator[str]:
    """Yield reasons for which DeepSpeed's ZeRO optimizers refuse a config, at start-up only."""
    stage = config.zero_optimization_stage
    takes_sums = getattr(config, "gradient_allreduce_op", "mean") == "sum"
    if stage < 2 or takes_sums or not config.zero_config.reduce_scatter:
        return
    scattered = f"under ZeRO-{stage} with zero_optimization.reduce_scatter"
    if config.gradient_predivide_factor != 1.0:
        factor = show(config.gradient_predivide_factor)
        yield f"gradient_predivide_factor={factor}: allowed {scattered}: 1.0; leave it out"
    if config.prescale_gradients:
        yield f"prescale_gradients=true: allowed {scattered}: false; leave it out"
