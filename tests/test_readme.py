"""What the README shows works, and what it and the configs promise is true."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

_CHECK = """
def whole(params):
    h = embed(params[0], None, batch)
    return loss(params[2], (middle(params[1], h, batch), h), batch) / 32
expected = jax.value_and_grad(whole)(params)
np.testing.assert_allclose(value, expected[0], rtol=1e-5)
for found, wanted in zip(grads, expected[1], strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
"""


def test_the_library_example_is_short_and_gives_the_gradients_of_one_process():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 20
    subprocess.run([sys.executable, "-c", example + _CHECK], check=True, cwd=ROOT)


def test_every_file_that_the_documents_name_exists():
    for document in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        text = document.read_text()
        for name in re.findall(r"\]\(((?:docs/|\w+\.md)[^)]*)\)", text):
            assert (document.parent / name).exists(), name
        for name in re.findall(r"\b((?:scripts|tests|configs)/[\w/]+\.py)\b", text):
            assert (ROOT / name).exists(), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("config", "score", "at_least", "at_most"),
    [
        ("configs/mm.py", "eval_exact_match", 0.9, 1.0),
        ("configs/lm.py", "eval_bits_per_byte", 0.0, 3.0),
    ],
)
def test_a_default_run_scores_what_its_config_promises(
    config, score, at_least, at_most, tmp_path
):
    command = [sys.executable, "-m", "rrfp_jax.main", f"--config={config}"]
    subprocess.run([*command, f"--workdir={tmp_path}"], check=True, cwd=ROOT)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    scores = [line[score] for line in map(json.loads, lines) if score in line]
    assert at_least <= scores[-1] <= at_most
