"""The decoder layers that are found in a model's class."""

from __future__ import annotations

import pytest
import torch

from server.engine.runtime.model.decoder import decoder_layers
from tests.checkpoint.families import COMMON, SERVED
from tests.engine.models import tiny_model
from tests.moe_checkpoints import FAMILIES, tiny_moe


@pytest.mark.parametrize("family", sorted({*SERVED, *FAMILIES}))
def test_all_layers_are_found(family: str) -> None:
    with torch.device("meta"):
        model = tiny_moe(family) if family in FAMILIES else tiny_model(family, **{**COMMON, **SERVED[family]})
    assert len(decoder_layers(model)) == model.config.num_hidden_layers
