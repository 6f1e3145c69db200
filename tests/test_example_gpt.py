import itertools

import torch
from capture_models import example, small_gpt

GPT = example("gpt")


def test_the_default_model_has_between_10_and_30_million_parameters():
    with torch.device("meta"):
        model = GPT.build_model()
    assert 10e6 < sum(parameter.numel() for parameter in model.parameters()) < 30e6


def test_the_example_batch_has_global_shapes_and_no_values():
    batch = GPT.example_batch(6, seq=32)
    assert set(batch) == {"tokens", "targets"}
    assert {tuple(t.shape) for t in batch.values()} == {(6, 32)}
    assert {t.device.type for t in batch.values()} == {"meta"}


def test_the_shares_of_all_ranks_make_the_batch_of_one_rank_every_step():
    whole = GPT.build_data(0, 1, global_batch=8, seq=16)
    parts = [GPT.build_data(rank, 4, global_batch=8, seq=16) for rank in range(4)]
    for batch in itertools.islice(whole, 3):
        shares = [next(part) for part in parts]
        for name, tensor in batch.items():
            assert torch.equal(torch.cat([share[name] for share in shares]), tensor)


def test_targets_are_the_tokens_shifted_by_one_and_the_text_is_python():
    batch = next(GPT.build_data(0, 1, global_batch=2, seq=64))
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert b"import" in bytes(GPT.python_source(200_000).tolist())


def test_a_small_model_learns_in_a_few_steps():
    torch.manual_seed(0)
    model = small_gpt(vocab=256)
    optimizer = GPT.build_optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    losses = []
    for batch in itertools.islice(GPT.build_data(0, 1, global_batch=8, seq=16), 40):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
