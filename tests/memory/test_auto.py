"""``cache="auto"``: when it waits, takes memory and gives it back.

The GPU's free memory is simulated (gpu/test_cache_gpu.py uses a real GPU).
"""

from __future__ import annotations

import pytest
import torch
from interrupts import interrupted_at_every_line
from oracle import layout_of, quantized
from target import linear
from torch._subclasses import FakeTensorMode
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import nf4_patch
from nf4_patch.cache.option import Uncached
from nf4_patch.cache.store import cache
from nf4_patch.libraries.bitsandbytes.adapters import observed
from nf4_patch.memory import spare as auto
from nf4_patch.nf4 import runtime
from nf4_patch.patching.targets import TARGETS

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A simulated GPU. PyTorch keeps the memory that the cache gave back (``spare``) until ``empty_cache``."""
    known = {"free": 10 * GIB, "reserved": 4 * GIB, "others": GIB, "margin": GIB}
    spare = []

    def empty_cache():
        while spare:
            size = spare.pop()
            known.update(free=known["free"] + size, reserved=known["reserved"] - size)

    monkeypatch.setattr(auto.MemoryInfo, "of", lambda device: auto.MemoryInfo(**known))
    monkeypatch.setattr(runtime, "devices_in_use", lambda: [0])
    monkeypatch.setattr(runtime, "empty_cache", empty_cache)
    monkeypatch.setattr(runtime, "allocation_retries", lambda device: 0)
    nf4_patch.enable(cache="auto")
    yield known, spare
    nf4_patch.disable()
    cache.taken.clear()


def inputs(*sizes, dtype=torch.bfloat16):
    with FakeTensorMode():
        return torch.empty(sizes, dtype=dtype, device="cuda:0")


BATCH = inputs(2, 512, 64)


def optimizer():
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1)


ADAM = optimizer()


def train(count, batch=BATCH, optimizers=(ADAM,)):
    """Run training steps: a forward pass, then a step of each optimizer."""
    for _ in range(count):
        cache.auto.observe(batch)
        for each in optimizers:
            each.step()


def budget_after(count, *args):
    """Return the budget in the forward pass after ``count`` training steps."""
    train(count, *args)
    cache.auto.observe(*args[:1] or (BATCH,))
    return cache.budget


SCHEDULES = {
    "two steps of the largest batch": "BS0 BS0 B9",
    "no library said how large its batch is": "S S S S0",
    "accumulated batches are one step": "BBBBS BBBB0",
    "optimizers of every layer make one step": "Bxyz B0 x0 B9",
    "another optimizer is about to make its state": "BS BS B9 x0 x0 BS B9",
    "a larger batch": "BS BS B9 L0 LS LS L9 BS LS B9",
    "a longer batch of fewer rows": "BS BS B9 M0 MS MS M9",
    "more rows and no longer ones": "BS BS B9 N0 NS NS N9",
}
BATCHES = {"B": (2, 512, 64), "L": (2, 1024, 64), "M": (1, 1024, 64), "N": (4, 512, 64)}


@pytest.mark.every(2)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_the_budget_in_the_course_of_a_training(gpu, schedule):
    """B, L, M and N are forward passes. S, x, y and z are steps of optimizers. A digit is the budget at that point, in GiB."""
    optimizers = {name: optimizer() for name in "Sxyz"}
    begun = {
        name: [] for name in optimizers
    }  # the budget when each step begins; 0 at the first step, which creates the state
    for name, each in optimizers.items():
        each.register_step_pre_hook(lambda *_, name=name: begun[name].append(cache.budget))
    for letter in schedule.replace(" ", ""):
        if letter in BATCHES:
            cache.auto.observe(inputs(*BATCHES[letter]))
        elif letter in optimizers:
            optimizers[letter].step()
        else:
            assert cache.budget == int(letter) * GIB
    assert not any(budgets[0] for budgets in begun.values() if budgets)


def test_an_interrupt_while_memory_is_taken(gpu, monkeypatch):
    train(auto.STEPS)
    with monkeypatch.context() as patched:
        patched.setattr(runtime, "empty_cache", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cache.auto.observe(BATCH)
    cache.auto.observe(inputs(2, 512, 64))
    assert cache.budget == 9 * GIB


class Taker:
    """A user of spare memory that takes its whole share."""

    def __init__(self, rank, most, known):
        self.taken, self.known = {}, known
        self.user = auto.User(rank, self.allow, self.taken, wants=lambda rest: most)

    def allow(self, budget):
        more = budget - self.taken.get(0, 0)
        self.taken[0] = budget
        self.known.update(free=self.known["free"] - more, reserved=self.known["reserved"] + more)


OTHER = optimizer()
GIVES_BACK = {  # what makes all users give their memory back, and whether it comes again after an interrupt
    "a larger batch": (lambda: auto.spare.observe(inputs(2, 1024, 64)), True),
    "another optimizer": (lambda: OTHER.step(), True),
    "a model is loaded": (lambda: auto.spare.give_back(auto.Waits.MODEL), False),
}


@pytest.mark.parametrize(("event", "comes_again"), GIVES_BACK.values(), ids=GIVES_BACK)
def test_an_interrupt_while_memory_is_given_back(gpu, event, comes_again):
    """The same event or the next step gives back the memory that the interrupt left. Later steps take it again."""
    takers = [Taker(rank, GIB, gpu[0]) for rank in (-2, -1)]
    spare, batch = auto.spare, inputs(2, 1024, 64) if comes_again else BATCH

    def both():
        return [taker.taken.get(0, 0) for taker in takers]

    def start():
        for taker in takers:
            spare.leave(taker.user)
            taker.allow(0)
        nf4_patch.disable()
        nf4_patch.enable(cache="auto")
        for taker in takers:
            spare.join(taker.user)
        train(auto.STEPS + 1)
        assert both() == [GIB, GIB]

    places = []
    try:
        for line in interrupted_at_every_line(
            event, auto.Spare.observed, auto.Spare.before_batch, auto.Spare.started, auto.Spare.give_back, auto.Spare.settle,
            auto.Spare.take, before=start,
        ):  # fmt: skip
            places.append(line)
            if comes_again:
                event()
            elif spare.waits:
                spare.observe(batch)
            else:
                continue  # nothing was given back yet
            assert both() == [0, 0] and cache.budget == 0, line
            train(auto.STEPS, batch, [OTHER] * comes_again or [ADAM])
            spare.observe(batch)
            assert (both(), cache.budget) == ([GIB, GIB], 7 * GIB), line
    finally:
        for taker in takers:
            spare.leave(taker.user)
    assert len(places) > 10


def test_it_takes_what_is_free_after_two_steps_of_the_largest_batch(gpu):
    train(auto.STEPS)
    assert cache.budget == 0
    cache.auto.observe(BATCH)
    assert cache.budget == 9 * GIB
    assert "9 GiB" in str(nf4_patch.status())
    gpu[0]["free"] = 2 * GIB
    assert budget_after(4, inputs(1, 512, 64)) == 9 * GIB  # what is free now is what the cache left


def test_the_source_of_the_batch_size(gpu):
    def forward(*_, **__):
        return None

    row = next(target for target in TARGETS if target.name.endswith("MatMul4Bit.forward"))
    read = observed(row, forward)
    assert read(None) is None  # no batch: the function itself says what is wrong
    for _ in range(auto.STEPS + 1):
        read(None, BATCH)
        budget = cache.budget
        ADAM.step()
    assert budget == 9 * GIB


@pytest.mark.every(2)
@pytest.mark.parametrize("lora", ["off", "fused"])
@pytest.mark.parametrize("reentrant", [True, False, None])
def test_every_forward_of_a_4_bit_layer_is_observed_once(gpu, linear_op, monkeypatch, reentrant, lora):
    """This includes reentrant checkpoints and evaluations, in which bitsandbytes 0.50 calls no autograd function."""
    peft = pytest.importorskip("peft")
    nf4_patch.enable(lora=lora)
    model = torch.nn.Sequential(linear(linear_op, 64, 64))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=4)).to(linear_op, torch.bfloat16)
    parameters = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.SGD(parameters, lr=0.1)
    observed, seen = cache.auto.observed, []
    cache.auto.next_look = float("inf")  # what is cached here lies on the CPU

    def on_a_gpu(x):
        seen.append(x.shape)
        observed(inputs(*x.shape))

    monkeypatch.setattr(cache.auto, "observed", on_a_gpu)
    for _ in range(auto.STEPS + 2):
        x = torch.randn(2, 150, 64, dtype=torch.bfloat16, device=linear_op, requires_grad=True)
        y = model(x) if reentrant is None else torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        budget = cache.budget
        y.sum().backward()
        adam.step()
    assert budget == 9 * GIB
    # Once for each forward, and for the recompute of a reentrant checkpoint, which detaches the input.
    assert len(seen) == (auto.STEPS + 2) * (2 if reentrant else 1)
    with torch.no_grad():
        model(torch.randn(2, 300, 64, dtype=torch.bfloat16, device=linear_op))
    assert cache.budget == 0 and nf4_patch.status().cache.waits == "BATCH" and 300 in nf4_patch.status().cache.numbers


def test_the_same_input_counts_once_between_two_steps(gpu, monkeypatch):
    """A function may pass its input to another function that reports it too.

    After a step, the same input begins another forward pass.
    """
    observed, seen = cache.auto.observed, []
    monkeypatch.setattr(cache.auto, "observed", lambda x: seen.append(x) or observed(x))
    for count in range(1, auto.STEPS + 2):
        for _ in range(3):
            cache.auto.observe(BATCH)
        assert len(seen) == count
        ADAM.step()
    assert cache.auto.steps == auto.STEPS and cache.budget == 9 * GIB
    for batch in (inputs(2, 512, 64), (BATCH, {}), (BATCH, {})):
        cache.auto.observe(batch)
    assert len(seen) == auto.STEPS + 4


def test_steps_inside_a_backward_pass_belong_to_one_training_step(gpu):
    """With optimizers in backward hooks and checkpointing, recomputed forward passes come between the steps."""
    layers = [optimizer() for _ in range(8)]

    def layer_is_done(gradient):
        for each in layers:
            each.step()
            cache.auto.observe(BATCH)
        assert cache.budget == 0

    for batch in (BATCH, inputs(2, 1024, 64)):  # the second one's optimizers have made their state
        for _ in range(auto.STEPS):
            x = torch.ones(1, requires_grad=True)
            x.register_hook(layer_is_done)
            cache.auto.observe(batch)
            assert cache.budget == 0
            x.sum().backward()
        cache.auto.observe(batch)
        assert cache.budget == 9 * GIB


def test_optimizers_that_are_equal_and_have_no_hash(gpu):
    class Equal(torch.optim.SGD):
        def __eq__(self, other):
            return True

    first, second = (Equal([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    assert budget_after(3, BATCH, [first]) == 9 * GIB
    second.step()
    assert cache.budget == 0 and not nf4_patch.status().errors


def test_it_gives_back_when_a_decode_runs_out_of_memory(gpu, device):
    """The caller then decodes the weight itself, as without the cache."""

    def full(weight):
        raise torch.OutOfMemoryError("CUDA out of memory")

    packed, state = quantized((64, 64), torch.bfloat16, device)
    weight = layout_of(torch.nn.Parameter(packed, requires_grad=False), state)
    assert budget_after(2) == 9 * GIB
    assert cache.read(weight, full) is None and cache.uncached == {Uncached.WAITING: 1}
    assert cache.budget == 0 and nf4_patch.status().cache.waits == "OUT_OF_MEMORY"
    nf4_patch.enable(cache=GIB)
    with pytest.raises(torch.OutOfMemoryError):
        cache.read(weight, full)
    assert not cache.weights and not any(cache.taken.values())


def test_it_gives_back_before_memory_is_reserved_for_another_model(gpu, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", "5.17")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    budgets = []
    monkeypatch.setattr(
        transformers.modeling_utils, "is_accelerator_device", lambda device: budgets.append(cache.budget)
    )
    assert budget_after(2) == 9 * GIB
    transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert set(budgets) == {0} and nf4_patch.status().cache.waits == "MODEL"
    assert budget_after(2) == 9 * GIB


def test_a_step_before_a_model_is_loaded_does_not_count(gpu):
    assert budget_after(1) == 0
    auto.spare.before_model()
    assert nf4_patch.status().cache.waits == "MODEL"
    assert [budget_after(1), budget_after(1)] == [0, 9 * GIB]


BESIDE = {  # the length to which the text grows, and the inputs of the forward passes for a text
    "an image in the same pass": (950, lambda text: [(inputs(1, 900, 64), {"text": [text]})]),
    "larger images in a pass of their own": (256, lambda text: [(inputs(1, 900, 32),), (text,)]),
}


@pytest.mark.parametrize(("longer", "observed"), BESIDE.values(), ids=BESIDE)
def test_text_that_grows_beside_images_of_one_size(gpu, longer, observed):
    for length, budget in ((128, 0), (128, 9 * GIB), (longer, 0), (longer, 9 * GIB)):
        for _ in range(auto.STEPS):
            for tensors in observed(inputs(1, length, 64)):
                cache.auto.observe(tensors)
            ADAM.step()
        assert cache.budget == budget


def test_what_it_gave_back_is_free_again(gpu):
    """Memory that PyTorch still holds after the cache gave it back does not count as needed by training steps."""
    known, spare = gpu
    budget_after(2)
    cache.taken[0] = 9 * GIB
    known.update(free=GIB, reserved=13 * GIB)
    spare.append(9 * GIB)
    longer = inputs(2, 513, 64)
    cache.auto.observe(longer)
    cache.taken[0] = 0
    known.update(free=known["free"] - GIB, reserved=known["reserved"] + GIB)  # which the longer batch takes
    assert budget_after(2, longer) == 8 * GIB


def test_memory_that_a_training_returns_after_each_step_counts_as_needed(gpu):
    """A script calls ``torch.cuda.empty_cache()`` after each step. The recording of CUDA graphs calls it too."""
    known, _ = gpu
    for _ in range(auto.STEPS):
        cache.auto.observe(BATCH)
        known.update(free=2 * GIB, reserved=12 * GIB)
        ADAM.step()
        known.update(free=10 * GIB, reserved=4 * GIB)
    cache.auto.observe(BATCH)
    assert cache.budget == GIB


def test_a_batch_that_was_seen_only_without_the_optimizers_state_is_measured_again(gpu):
    """The first batch of a training is often the largest one."""
    longest, adam = inputs(2, 1024, 64), optimizer()
    train(1, longest, [adam])
    assert budget_after(1, BATCH, [adam]) == 9 * GIB
    cache.auto.observe(longest)
    assert cache.budget == 0 and nf4_patch.status().cache.waits == "BATCH"
    train(auto.STEPS, longest, [adam])
    cache.auto.observe(longest)
    train(1, BATCH, [adam])
    cache.auto.observe(longest)
    assert cache.budget == 9 * GIB


@pytest.mark.parametrize("has_backward", [True, False])
def test_a_forward_without_a_backward_does_not_show_what_a_step_needs(gpu, monkeypatch, has_backward):
    """It might have been interrupted."""
    monkeypatch.setattr(runtime, "DEVICE", "cpu")

    def step(length, has_backward=True):
        x = torch.zeros(1, length, 4, requires_grad=True) * 1
        cache.auto.observe(x)
        assert not x._backward_hooks  # torch.save would warn of a hook
        if has_backward:
            x.sum().backward()

    for length, whole in ((8, True), (16, has_backward), (8, True), (8, True)):
        step(length, whole)
        ADAM.step()
    step(8)
    assert cache.budget == 9 * GIB
    step(16)
    assert (cache.budget == 0) is not has_backward


def test_a_batch_in_whose_backward_an_optimizer_makes_its_state_is_measured_again(gpu, monkeypatch):
    """The first step of the optimizer comes before the backward reaches the input."""
    monkeypatch.setattr(runtime, "DEVICE", "cpu")
    new = optimizer()

    def forward(length):
        x = torch.zeros(1, length, 4, requires_grad=True) * 1
        cache.auto.observe(x)
        return x * 1

    result = forward(16)
    result.register_hook(lambda _: new.step())
    result.sum().backward()
    forward(8).sum().backward()
    new.step()
    forward(8)
    assert cache.budget == 9 * GIB
    forward(16)
    assert cache.budget == 0 and nf4_patch.status().cache.waits == "BATCH"


def test_a_batch_whose_memory_was_returned_to_the_driver_is_measured_again(gpu):
    """Memory of a user was in use before the batch, and was freed in its backward. Then PyTorch's unused memory is returned."""
    known, _ = gpu
    taker = Taker(-1, GIB, known)
    taker.user.allow = lambda budget: taker.allow(budget or taker.taken.get(0, 0))  # which cannot be freed now
    auto.spare.join(taker.user)
    try:
        assert budget_after(2) == 8 * GIB
        longer = inputs(2, 1024, 64)
        train(1, longer)
        known.update(free=13 * GIB, reserved=GIB)
        taker.taken.clear()
        assert budget_after(2) == 8 * GIB
        cache.auto.observe(longer)
        assert cache.budget == 0 and nf4_patch.status().cache.waits == "BATCH"
    finally:
        auto.spare.leave(taker.user)


def test_memory_of_another_user_that_is_never_freed(gpu):
    """For example, a forward with gradients whose result a script keeps. A budget is found nevertheless."""
    known, _ = gpu
    taker = Taker(-1, GIB, known)
    taker.user.allow = lambda budget: taker.allow(GIB)
    auto.spare.join(taker.user)
    try:
        assert budget_after(3) == 7 * GIB
        for _ in range(4):
            cache.auto.observe(inputs(2, 1024, 64))
            train(1)
        cache.auto.observe(inputs(2, 1024, 64))
        assert cache.budget == 7 * GIB
    finally:
        auto.spare.leave(taker.user)


def test_the_memory_of_the_largest_batch_is_remembered(gpu):
    """After memory ran short, the next steps may have small batches."""
    known, _ = gpu
    budget_after(2)
    cache.auto.give_back(auto.Waits.MEMORY, 1, 0)
    known.update(free=12 * GIB, reserved=2 * GIB)
    assert budget_after(2, inputs(1, 16, 64)) == 9 * GIB


@pytest.mark.parametrize("change", [{"free": GIB // 4}, {"others": 2 * GIB}])
def test_it_gives_back_when_memory_runs_short_or_another_process_comes(gpu, change):
    budget_after(2)
    cache.taken[0] = GIB
    gpu[0].update(change)
    cache.auto.look()
    assert cache.budget == 0
    cache.taken[0] = 0
    assert budget_after(2) == 0  # as long as it is so


@pytest.mark.parametrize(
    ("now", "later", "budget"), [({"others": 8 * GIB}, {"others": GIB}, 9), ({"free": GIB}, {"free": 3 * GIB}, 2)]
)
def test_it_takes_nothing_while_another_process_uses_the_gpu_or_only_the_margin_is_free(gpu, now, later, budget):
    gpu[0].update(now)
    assert budget_after(2) == 0
    assert ("OTHER_PROCESS" if "others" in now else "MARGIN") == nf4_patch.status().cache.waits
    gpu[0].update(later)
    assert budget_after(2) == budget * GIB


def test_another_mode_no_longer_follows_the_optimizer(gpu):
    watching = cache.auto
    hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    nf4_patch.enable(cache=f"{GIB}B")
    assert cache.auto is None
    assert (len(_global_optimizer_pre_hooks) + 1, len(_global_optimizer_post_hooks) + 1) == hooks
    watching.observe(BATCH)
    assert cache.budget == GIB


def test_what_it_learned_stays_through_a_block_that_names_another_option(gpu, device):
    """For GRPO's rollouts with the fused matmul, budget, optimizers, batches and cached weights stay."""
    assert budget_after(2) == 9 * GIB
    cache.auto.next_look = float("inf")  # what is cached here lies on the CPU
    watching, why = cache.auto, nf4_patch.status().cache.budget
    watching.next_look = float("inf")  # what is cached here lies on the CPU
    packed, state = quantized((64, 64), torch.bfloat16, device)
    weight = layout_of(torch.nn.Parameter(packed, requires_grad=False), state)
    dense = cache.read(weight, lambda weight: torch.zeros(64, 64, dtype=torch.bfloat16, device=device))
    for _ in range(2):
        with nf4_patch.enabled(matmul="auto"):
            assert cache.auto is watching and cache.read(weight, None) is dense
        assert (cache.auto, nf4_patch.status().cache.budget, cache.budget) == (watching, why, 9 * GIB)
        ADAM.step()
        cache.auto.observe(BATCH)
    assert cache.read(weight, None) is dense and cache.budget == 9 * GIB


def test_an_error_of_its_own_stops_no_training(gpu, monkeypatch):
    monkeypatch.setattr(auto.MemoryInfo, "of", lambda device: 1 / 0)
    assert budget_after(2) == 0
    assert any("ZeroDivisionError" in error for error in nf4_patch.status().errors)
    monkeypatch.setattr(cache.user, "allow", lambda budget: 1 / 0)
    optimizer().step()


@pytest.mark.parametrize(
    ("x", "size"),
    [(torch.zeros(2, 512, 64), (64, 1024, 512)), (torch.zeros(30, 64), (64, 30, 30)), (torch.zeros(64), (64, 1, 1))],
)  # fmt: skip
def test_the_size_of_a_batch(x, size):
    assert auto.size_of(x) == size
