"""The comparison of Fishers: KFAC is closest, and exact where it is known to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nclbayes.experiments.figures import Results
from nclbayes.experiments.figures.fisher import APPROXIMATIONS, RECIPE
from nclbayes.experiments.figures.fisher_network import LIKELIHOODS, Network
from nclbayes.kronecker import scale_free_kl

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

QUICK = RECIPE.scales["quick"]


def test_kfac_is_closest_to_the_fisher_of_w(made: tuple[Results, Path]) -> None:
    results, _ = made
    claims = [statement for statement in results.statements if "KFAC has the lowest" in statement.claim]
    assert len(claims) == 2 * len(LIKELIHOODS)
    assert all(statement.holds for statement in claims)
    # The statements are those of the table.
    for row in results.tables["divergences"]:
        if row["weights"] == "W" and row["approximation"] == "kfac":
            others = [
                other["kl"]
                for other in results.tables["divergences"]
                if all(other[key] == row[key] for key in ("network", "likelihood", "weights"))
                and other["approximation"] in set(APPROXIMATIONS) - {"kfac"}
            ]
            assert len(others) == 3
            assert row["kl"] < min(others)


def test_every_combination_is_in_the_table(made: tuple[Results, Path]) -> None:
    results, out = made
    keys = ("network", "likelihood", "weights", "approximation")
    found = {tuple(row[key] for key in keys) for row in results.tables["divergences"]}
    assert len(found) == len(results.tables["divergences"])
    assert len(found) == QUICK["networks"] * len(LIKELIHOODS) * 2 * (len(APPROXIMATIONS) + 1)
    assert all(row["kl"] >= -1e-9 for row in results.tables["divergences"])
    pictures = {f"fisher-{likelihood}.png" for likelihood in LIKELIHOODS}
    assert {path.name for path in out.iterdir()} == {"figure.json", "results.json", "divergences.csv", *pictures}


def test_kfac_is_exact_for_a_readout_with_gaussian_outputs(made: tuple[Results, Path]) -> None:
    results, _ = made
    for row in results.tables["divergences"]:
        exact = row["weights"] == "C" and "gaussian" in row["likelihood"] and row["approximation"] == "kfac"
        # Unit noise makes OWM exact too.
        exact = exact or (row["weights"], row["likelihood"], row["approximation"]) == ("C", "gaussian", "owm")
        assert (row["kl"] < 0.05) == exact or row["likelihood"] == "categorical"


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_kfac_of_one_step_and_one_sequence_is_the_exact_fisher(likelihood: str) -> None:
    settings = {**QUICK, "sequences": 1, "steps": 1}
    network = Network.drawn(settings, torch.Generator().manual_seed(3))
    exact, kfac = network.exact(likelihood), network.kfac(likelihood)
    for site in "WC":
        torch.testing.assert_close(torch.kron(kfac[site].input, kfac[site].output), exact[site])


def test_the_reference_is_no_approximation(made: tuple[Results, Path]) -> None:
    """Rotations keep the spectrum, so the reference does not depend on the direction of the divergence much."""
    results, _ = made
    rotated = [row for row in results.tables["divergences"] if row["approximation"] == "rotated"]
    assert len(rotated) == QUICK["networks"] * len(LIKELIHOODS) * 2
    for row in rotated:
        assert row["kl"] == pytest.approx(row["reverse_kl"], rel=0.3)


def test_without_process_noise_directions_of_w_change_nothing() -> None:
    network = Network.drawn({**QUICK, "process_noise": 0.0}, torch.Generator().manual_seed(0))
    values = torch.linalg.eigvalsh(network.exact("gaussian")["W"])
    units, outputs = QUICK["units"], QUICK["outputs"]
    # States can be changed linearly without the readout seeing it.
    assert int((values < 1e-9 * values[-1]).sum()) >= units * (units - outputs)
    noisy = Network.drawn(QUICK, torch.Generator().manual_seed(0)).exact("gaussian")["W"]
    assert float(torch.linalg.eigvalsh(noisy)[0]) > 0
    assert float(scale_free_kl(noisy, noisy)) == pytest.approx(0, abs=1e-6)
