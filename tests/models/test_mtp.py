"""Prediction modules compute what the publication says, of every document of a row as if it were alone."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import hugging_face_model, model_with_large_weights, random_tokens, shrunk
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llama_core.config.model_weights import hugging_face_name
from llama_core.models.batch import IGNORE_INDEX, Batch, looking_ahead
from llama_core.models.llama import Llama
from llama_core.models.next_token import NextToken

SPEC = replace(shrunk("llama3_8b"), mtp_layers=2)
WEIGHT = 0.6
LENGTHS = (9, 1, 14, 2)


def wide_model(spec):
    model = model_with_large_weights(spec).double()
    model.compute_dtype = torch.float64
    model.tok_embeddings.out_dtype = torch.float64
    return model


def packed(seed=1):
    """Return one row of documents, the second half of whose first one has no targets."""
    tokens = random_tokens(1, sum(LENGTHS) + 1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    targets = tokens[:, 1:].clone()
    targets[positions.roll(-1, 1) == 0] = IGNORE_INDEX
    targets[:, 4:7] = IGNORE_INDEX
    return Batch(tokens[:, :-1], targets, positions)


class Reference:
    """Equations 21 to 25 over one document: transformers' blocks, and no code of ours."""

    def __init__(self, ours):
        spec = ours.spec
        self.spec = spec
        self.whole = hugging_face_model(replace(spec, num_layers=spec.num_blocks, mtp_layers=0)).double()
        for path, module in list(self.whole.named_modules()):
            if isinstance(module, LlamaRMSNorm):  # which computes in fp32
                self.whole.set_submodule(path, nn.RMSNorm(spec.hidden_size, spec.norm_eps, dtype=torch.float64))
        stored = {hugging_face_name(name): value.detach() for name, value in ours.named_parameters()}
        own = self.whole.state_dict()
        self.whole.load_state_dict(own | {name: value for name, value in stored.items() if name in own})
        self.leaves = {name: nn.Parameter(value.clone()) for name, value in stored.items() if name not in own}

    def parameter(self, name):
        name = hugging_face_name(name)
        return self.leaves[name] if name in self.leaves else self.whole.get_parameter(name)

    def norm(self, x, block, name):
        weight = self.leaves[f"model.layers.{block}.{name}.weight"]
        return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.spec.norm_eps)

    def run(self, x, blocks):
        rotation = self.whole.model.rotary_emb(x, torch.arange(x.shape[1])[None])
        for block in blocks:
            x = self.whole.model.layers[block](x, attention_mask=None, position_embeddings=rotation)
        return x

    def cross_entropy(self, hidden, targets):
        logits = self.whole.lm_head(hidden)
        return F.cross_entropy(logits[0], targets, reduction="sum", ignore_index=IGNORE_INDEX)

    def losses(self, tokens, targets):
        """Return the loss of the next token, and that of each module, summed over a document [1, S]."""
        embedded = self.whole.model.embed_tokens(tokens)
        h = self.run(embedded, range(self.spec.num_layers))
        losses = [self.cross_entropy(self.whole.model.norm(h), targets[0])]
        for k in range(1, self.spec.mtp_layers + 1):
            block = self.spec.num_layers + k - 1
            h = h[:, :-1]
            if not h.shape[1]:
                losses.append(torch.zeros((), dtype=torch.float64))
                continue
            ahead = self.norm(embedded[:, k:], block, "enorm")
            joined = torch.cat((ahead, self.norm(h, block, "hnorm")), dim=-1)
            h = self.run(joined @ self.leaves[f"model.layers.{block}.eh_proj.weight"].T, [block])
            losses.append(self.cross_entropy(self.norm(h, block, "shared_head.norm"), targets[0, k:]))
        return torch.stack(losses)


def test_losses_and_gradients_are_those_of_the_publication():
    ours = wide_model(SPEC)
    ours.objective = NextToken(mtp_weight=WEIGHT)
    batch = packed()
    loss = ours(batch.tokens_BS, looking_ahead(batch, SPEC.mtp_layers))
    loss.backward()
    reference = Reference(ours)
    pieces = zip(batch.tokens_BS.split(LENGTHS, 1), batch.targets_BS.split(LENGTHS, 1), strict=True)
    expected = sum(reference.losses(tokens, targets) for tokens, targets in pieces)
    torch.testing.assert_close(loss.detach(), expected[0].detach(), rtol=1e-12, atol=0)
    measured = ours.prediction_losses.take_measured()
    torch.testing.assert_close(measured[:2], expected[1:].detach(), rtol=1e-12, atol=0)
    (expected[0] + WEIGHT / 2 * expected[1:].sum()).backward()
    for name, parameter in ours.named_parameters():
        other = reference.parameter(name).grad
        assert (parameter.grad - other).abs().max() < 1e-10 * other.abs().max(), name


def test_each_module_counts_the_targets_that_its_documents_have():
    """Targets of a module are those of the token that it looks ahead to, so masked ones stay masked."""
    targets = [targets[0] for targets in packed().targets_BS.split(LENGTHS, 1)]
    for k, later in enumerate(looking_ahead(packed(), 2).later, start=1):
        expected = [
            F.pad(of_document[k:], (0, min(k, len(of_document))), value=IGNORE_INDEX) for of_document in targets
        ]
        assert torch.equal(later.targets_BS[0], torch.cat(expected))


@pytest.mark.parametrize("num_modules", [1, 4])
def test_rows_shorter_than_the_modules_look_have_no_targets(num_modules):
    tokens = random_tokens(2, 2)
    later = looking_ahead(Batch(tokens, tokens, None), num_modules).later
    assert [one.tokens_BS.shape for one in later] == num_modules * [(2, 2)]
    assert [int((one.targets_BS != IGNORE_INDEX).sum()) for one in later] == [2, 0, 0, 0][:num_modules]


def test_modules_run_only_for_a_batch_that_looks_ahead():
    model = model_with_large_weights(SPEC)
    plain = Llama(replace(SPEC, mtp_layers=0))
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name in plain.state_dict()})
    batch = packed()
    assert torch.equal(model(batch.tokens_BS, batch), plain(batch.tokens_BS, batch))
    assert torch.equal(model(batch.tokens_BS), plain(batch.tokens_BS))
    assert model.prediction_losses.take_measured() is None


def test_parameters_are_those_that_the_model_counts():
    model = Llama(SPEC)
    assert {name: tuple(value.shape) for name, value in model.named_parameters()} == SPEC.parameter_shapes
    assert list(SPEC.parameter_shapes) == [name for name, _ in model.named_parameters()]
    size = SPEC.hidden_size
    own = SPEC.num_parameters - replace(SPEC, mtp_layers=0).num_parameters
    assert own == 2 * (SPEC.layer_parameters + 2 * size * size + 3 * size)
