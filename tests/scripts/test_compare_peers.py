"""The comparison's flags, and its turns; no peer is needed."""

import pathlib

import pytest

from rrfp_jax.errors import ConfigError
from scripts import compare_peers
from scripts.peers import network, registry, settings


def plan(**changes: object) -> compare_peers.Plan:
    values = {"num_microbatches": 4, "repeats": 2, "seeds": 2}
    values |= {"systems": [registry.ours()], "settings": settings.ALL} | changes
    return compare_peers.Plan(**values)  # type: ignore[arg-type]


def test_every_turn_has_seeds_of_its_own_and_all_settings_of_its_ranks():
    turns = compare_peers.turns(plan(has_links=False))
    assert [turn.job.num_ranks for turn in turns] == [4, 8] * 2
    assert {turn.link_bytes_per_s for turn in turns} == {0.0}
    for turn, seeds in zip(turns, [(0, 1)] * 2 + [(2, 3)] * 2, strict=True):
        names = [str(s) for s in settings.ALL if s.num_ranks == turn.job.num_ranks]
        found = [(each.seed, each.setting) for each in turn.job.iterations]
        assert found == [(seed, name) for seed in seeds for name in names]


def test_with_links_a_turn_is_of_one_workload_whose_payloads_fit_its_links():
    turns = compare_peers.turns(plan(has_links=True, repeats=1))
    assert len(turns) == 4
    for turn in turns:
        (kind,) = {each.setting.split()[0] for each in turn.job.iterations}
        setting = settings.Setting(kind, turn.job.num_ranks, "J1")
        times = setting.workload.times(setting.num_ranks).transfer_s[:-1]
        mean_s = setting.workload.scale * sum(times) / len(times)
        payload_bytes = 4 * turn.job.width * turn.job.rows
        assert payload_bytes / turn.link_bytes_per_s == pytest.approx(mean_s)


def test_links_that_cannot_be_made_are_refused(monkeypatch):
    monkeypatch.setattr(network.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="ip and tc missing"):
        network.check()
    assert not network.is_possible()


def test_a_missing_environment_is_found_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="deepspeed is not installed") as raised:
        compare_peers.main(["--peers=deepspeed", f"--peer_venvs={tmp_path}"])
    python = tmp_path / "deepspeed/bin/python"
    assert f"there is no {python}" in str(raised.value)
    assert f"python3.11 -m venv {tmp_path}/deepspeed\n" in str(raised.value)


def test_a_pipeline_of_one_rank_is_refused():
    with pytest.raises(ConfigError, match="--ranks names 1"):
        compare_peers.main(["--peers=", "--ranks", "4", "1"])


def test_an_unknown_peer_is_named_with_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match="torch_pipelining"):
        compare_peers.main(["--peers=megatron", f"--peer_venvs={tmp_path}"])


@pytest.mark.parametrize("name", registry.PEERS)
def test_the_readme_of_a_peer_has_the_commands_that_install_it(name):
    folder = registry.THIRD_PARTY / name
    text = pathlib.Path(folder, "README.md").read_text()
    for command in registry.install(name, folder / ".venv"):
        assert f"    {command}\n" in text


@pytest.mark.parametrize("name", registry.PEERS)
def test_requirements_pin_every_package_and_name_no_host(name):
    text = (registry.THIRD_PARTY / name / "requirements.txt").read_text()
    for line in text.splitlines():
        package, version = line.split("==")
        assert package.strip("-_.").replace("-", "_").isidentifier(), line
        assert version[0].isdigit(), line


def test_the_table_of_systems_names_every_folder():
    text = (registry.THIRD_PARTY / "README.md").read_text()
    for name in registry.PEERS:
        assert f"[{name}]({name}/README.md)" in text
