"""Typed run configuration: schema, YAML loading, and the rules that need the model's dims. Torch-free."""

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.errors import ConfigError, Violation
from jetrl_megatron.config.load import dump_config, load_config
from jetrl_megatron.config.plan import check_model, plan_rows, resolve_tp_invariant
from jetrl_megatron.config.preflight import preflight, read_dims
from jetrl_megatron.config.schema import RunConfig

__all__ = [
    "ConfigError",
    "ModelDims",
    "RunConfig",
    "Violation",
    "check_model",
    "dump_config",
    "load_config",
    "plan_rows",
    "preflight",
    "read_dims",
    "resolve_tp_invariant",
]
