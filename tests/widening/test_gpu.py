"""Widening on a GPU: fused and capturable optimizers, state on the device, wide models made where the narrow one is."""

import pytest
import torch
from architectures import CASES, cross_entropy
from nets import OPTIMIZERS, backward, features, mlp

import mupscale
from mupscale.cuda_graph import CapturedStep
from mupscale.spectral import spectral_norms

pytestmark = pytest.mark.gpu


def batches(case):
    return [tuple(x.cuda() for x in batch) for batch in case.batches()]


@pytest.mark.parametrize(
    "settings", [{"fused": True}, {"capturable": True}, {"capturable": True, "foreach": False}, {"foreach": True}]
)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_adamw_variants_are_exact(settings: dict[str, bool], tensor_lr: bool):
    if tensor_lr and settings == {"foreach": True}:
        pytest.skip("torch has no tensor learning rate there")
    case = CASES["gpt2_untied"]
    torch.manual_seed(0)
    narrow, wide = case.build(8).cuda(), case.build(24).cuda()

    def optimizer(params):
        # the fused kernel takes a float32 rate only
        dtype = torch.float32 if "fused" in settings else torch.float64
        lr = torch.tensor(0.003, dtype=dtype, device="cuda") if tensor_lr else 0.003
        return torch.optim.AdamW(params, lr=lr, eps=1e-3, amsgrad=True, **settings)

    verdict = mupscale.verify(
        narrow, wide, optimizer=optimizer, batches=batches(case), loss=cross_entropy, steps=50, clip=0.05
    )
    assert verdict.passed, verdict
    # a capturable optimizer counts steps in float32, a fused one keeps a tensor rate in float32
    rounds = "capturable" in settings or (tensor_lr and "fused" in settings)
    assert verdict.loss_drift <= (1e-7 if rounds else 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_architectures_are_exact(name: str):
    case = CASES[name]
    torch.manual_seed(0)
    narrow, wide = case.build(case.narrow).cuda(), case.build(case.wide).cuda()
    verdict = mupscale.verify(
        narrow,
        wide,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9),
        batches=batches(case),
        loss=cross_entropy,
        steps=30,
        clip=0.05,
        hints=mupscale.Hints(roles=case.plain_roles),
    )
    assert verdict.passed, verdict


@pytest.mark.parametrize(("fused", "step_device"), [(True, "cuda"), (False, "cpu")])
def test_a_meta_model_is_made_where_the_narrow_one_is(fused: bool, step_device: str):
    case = CASES["resnet18"]
    narrow = case.build(2).cuda()
    with torch.device("meta"):
        wide = case.build(4)
    optimizer = torch.optim.AdamW(narrow.parameters(), fused=fused)
    cross_entropy(narrow, batches(case)[0]).backward()
    optimizer.step()
    report = mupscale.upscale(narrow, wide, optimizer, noise=mupscale.SignalNoise(0.1), consume=True)
    assert {t.device.type for t in (*wide.parameters(), *wide.buffers())} == {"cuda"}
    assert {state["step"].device.type for state in report.optimizer.state.values()} == {step_device}
    cross_entropy(wide, batches(case)[0]).backward()
    report.optimizer.step()
    assert not any(p.numel() for p in narrow.parameters())


def test_from_the_cpu_to_the_gpu():
    case = CASES["mlp"]
    narrow, wide = case.build(case.narrow), case.build(case.wide).cuda()
    optimizer = torch.optim.AdamW(narrow.parameters(), fused=True)
    cross_entropy(narrow, case.batches()[0]).backward()
    optimizer.step()
    report = mupscale.upscale(narrow, wide, optimizer)
    cross_entropy(wide, batches(case)[0]).backward()
    report.optimizer.step()
    assert {state["exp_avg"].device.type for state in report.optimizer.state.values()} == {"cuda"}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_clipping_never_waits_for_the_device():
    case = CASES["gpt2_untied"]
    narrow, wide = case.build(8).cuda(), case.build(16).cuda()
    mupscale.upscale(narrow, wide)
    cross_entropy(wide, batches(case)[0]).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mupscale.clip_grad_norm_(wide, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_spectral_norms_against_svd():
    torch.manual_seed(0)
    matrices = torch.randn(9, 512, 256, device="cuda")
    truth = torch.linalg.matrix_norm(matrices.double(), ord=2)
    torch.testing.assert_close(spectral_norms(matrices), truth, rtol=1e-4, atol=0)


def test_centred_noise_keeps_the_function():
    """And is the same in two upscales with one seed."""
    case = CASES["llama"]
    torch.manual_seed(0)
    narrow, wide, again = (case.build(size).double().cuda() for size in (case.narrow, case.wide, case.wide))
    batch = batches(case)[0]
    before = cross_entropy(narrow, batch).item()
    for model in (wide, again):
        mupscale.upscale(narrow, model, noise=mupscale.AdditiveNoise(0.1, centred=True), seed=4)
    assert cross_entropy(wide, batch).item() == pytest.approx(before, rel=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(wide.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_warm_up_of_new_copies_inside_a_cuda_graph(kind: str):
    """Counts on, as it does step by step."""
    losses = []
    for captured in (False, True):
        torch.manual_seed(0)
        narrow, wide = mlp(8).cuda(), mlp(16).cuda()
        optimizer = OPTIMIZERS[kind](narrow.parameters())
        inputs = features().cuda()
        for _ in range(5):
            backward(narrow, inputs)
            optimizer.step()
        method = mupscale.methods.Duplication(state="reset_new_copies", rewarm_steps=15)
        report = mupscale.upscale(narrow, wide, optimizer, method=method)
        after = report.optimizer
        for _ in range(3):
            backward(wide, inputs)
            after.step()
        step = CapturedStep(lambda batch, wide=wide: backward(wide, batch), after, inputs) if captured else None
        values = []
        for _ in range(20):
            if step is not None:
                values.append(float(step(inputs)))
            else:
                values.append(float(backward(wide, inputs)))
                after.step()
        losses.append(values)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]
