"""The paper item by item: each row names the test that pins it, and rows without one elsewhere are tested here."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from sader.evaluation.reproduce import published as paper
from sader.evaluation.reproduce.plans import TABLES
from sader.method.diffusion import generator_noise, karras_sigmas, sample
from sader.method.guides import LearnedGuide, make_guide
from sader.model.masked_autoencoder import MaskedAutoencoderConfig
from sader.models import get_preset
from sader.training.config import PAPER_TRAINING, differing_keys, in_steps, resolve
from sader.training.optim import scheduled_rate

TESTS = Path(__file__).parent

PINNED: dict[str, dict[str, str]] = {
    "test_diffusion.py": {
        "forward process": "test_forward_formula_has_one_clear_image_and_one_sigma_but_noise_per_date",
        "preconditioning, weight 1 / c_out^2": "test_coefficients_of_both_datasets",
        "D = c_skip mean + c_out F over present dates": "test_denoiser_counts_only_the_present_dates",
        "training noise levels": "test_training_noise_is_log_normal",
    },
    "test_sampling.py": {
        "sampling grids": "test_karras_grids_of_both_datasets",
        "reverse ODE, Euler": "test_euler_step_equals_the_ode_with_the_mean",
        "start of the sampling": "test_start_is_initial_plus_mean_plus_noise_and_draw_zero",
    },
    "model/test_mtcdn.py": {
        "size and cost of MTCDN": "test_cost_of_the_papers_network",
        "condition computed once": "test_condition_made_once_equals_condition_made_at_every_step",
    },
    "model/test_fusion.py": {
        "temporal attention per pixel": "test_one_changed_pixel_of_one_date_changes_that_pixel_only",
    },
    "model/test_attention.py": {
        "neighbourhood attention": "test_neighbourhood_attention_is_the_definition",
        "HABlock depends on the noise level": "test_hybrid_block_starts_as_identity_and_listens_to_the_noise_level",
    },
    "test_losses.py": {
        "terms of the loss": "test_every_term_by_hand",
        "thickness, one map of H x W": "test_thickness_is_one_map_for_all_bands",
        "loss weights, threshold, form": "test_loss_configs_are_the_published_numbers",
        "brightness in YUV": "test_yuv_of_pure_colours",
    },
    "training/test_objective.py": {
        "unknown target pixels": "test_pixels_that_are_not_scored_have_no_influence",
        "days in training": "test_days_reach_the_network_in_training",
    },
    "test_resampling.py": {
        "Algorithm 1": "test_the_paper_variant_is_algorithm_1_line_by_line",
        "Algorithm 1 in a remover": "test_a_remover_of_a_paper_preset_runs_algorithm_1",
        "Algorithm 1 in the commands": "test_resampling_is_chosen_by_name_everywhere",
        "T_h is the mean cloud cover": "test_cloud_cover_is_the_mean_of_known_masks",
        "without correction": "test_without_a_guide_the_new_candidate_is_always_taken",
    },
    "model/test_guide.py": {
        "size of the masked autoencoder": "test_paper_size",
        "frozen guide": "test_evaluation_mode_is_enforced_and_given_back",
    },
    "training/test_guide_training.py": {
        "pretraining on EuroSAT-MS": "test_the_published_pretraining_runs_on_eurosat_ms",
    },
    "evaluation/test_reproduce.py": {
        "guides of the tables": "test_guides_of_the_papers_tables_are_pretrained_as_published",
        "keys hold the cloud cover": "test_another_cloud_cover_changes_every_key",
        "Tables 1 to 6 run": "test_every_table_runs_and_shows_ours_beside_the_published",
        "Table 7": "test_complexity_stands_beside_the_published",
        "ablations": "test_ablations_change_what_they_say",
        "schedules of the baselines": "test_baselines_of_table1_have_their_own_inputs_and_epochs",
        "improvement rows": "test_improvement_is_relative_to_the_best_baseline",
        "weights of the loss": "test_weights_of_the_loss_are_those_of_the_row",
        "figure of the loss": "test_the_figure_of_the_loss_needs_no_training",
        "dry runs": "test_the_dry_run_of_sader_prints_the_papers_settings",
    },
    "training/test_run.py": {
        "optimiser, batch, epochs, averaging, precision": "test_presets_of_the_paper_carry_its_training",
        "epochs counted in series": "test_epochs_count_the_series_of_the_shards",
        "checkpoints by time": "test_checkpoints_wait_for_the_time_between_them",
    },
    "training/test_optim.py": {
        "Muon": "test_muon_step_is_its_definition",
    },
    "training/test_ema.py": {
        "weight average with warm-up": "test_update_follows_the_warm_up",
    },
    "data/test_bank.py": {
        "order of dates": "test_dates_keep_their_order_where_the_network_has_an_index",
    },
    "data/test_sen2_mtc.py": {
        "Sen2_MTC_New values and bands": "test_values_and_bands",
    },
    "data/test_sen12mscrts.py": {
        "East Asia test region": "test_east_asia_as_published_is_one_region",
        "training sampler": "test_training_never_uses_the_sampler_of_the_test",
        "s2cloudless": "test_cover_by_s2cloudless_chooses_the_target",
    },
    "test_metrics.py": {
        "PSNR": "test_psnr_equals_scikit_image",
        "SSIM": "test_zero_padded_ssim_equals_scipy",
        "SAM": "test_sam_by_hand_and_exact_near_zero",
        "LPIPS": "test_lpips_golden_values",
        "stretch of Sen2_MTC_New": "test_mtc_stretch_by_hand",
    },
    "evaluation/test_compare.py": {
        "costs count the guide that is used": "test_costs_count_the_guide_that_is_used",
    },
}
"""File -> item of the paper -> test."""


@lru_cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "item"), [(file, item) for file, items in PINNED.items() for item in items])
def test_every_item_of_the_paper_has_its_test(file: str, item: str) -> None:
    name = PINNED[file][item]
    assert name in functions(file), f"{file} has no {name}: name the test that pins {item!r} now"


def test_the_result_is_the_mean_of_the_last_states() -> None:
    """Algorithm 1, line 16: at sigma = 0 every frame equals the last prediction."""
    mean = torch.rand(1, 3, 2, 4, 4)
    seen: list[torch.Tensor] = []

    def denoise(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        seen.append(x.mean(dim=1).tanh())
        return seen[-1]

    sigmas = karras_sigmas(3, sigma_min=0.001, sigma_max=40)
    assert torch.equal(sample(denoise, mean, generator_noise((3, 2, 4, 4), [1]), sigmas, alpha=1.0), seen[-1])


@pytest.mark.parametrize("name", PAPER_TRAINING)
def test_rates_rise_for_500_steps_and_fall_to_one_percent_at_50000(name: str) -> None:
    train = PAPER_TRAINING[name]

    def factor(step: int) -> float:
        return scheduled_rate(train, step, 0.0)

    assert [factor(step) for step in (0, 250, 500, 50_000, 60_000)] == pytest.approx([0, 0.5, 1, 0.01, 0.01])
    assert in_steps(PAPER_TRAINING["sen2_mtc_new"], 2380).steps == 29_800
    assert factor(29_800) == pytest.approx(0.36, abs=0.01)


@pytest.mark.parametrize(("name", "symmetries"), [("sen2_mtc_new", True), ("sen12mscrts_ea", False)])
def test_a_paper_preset_trains_the_papers_task_alone(name: str, symmetries: bool) -> None:
    maker = resolve(name).data.maker
    assert maker.tasks == (0.0, 1.0, 0.0)
    assert maker.symmetries is symmetries
    assert maker.band_dropout == ()


@pytest.mark.parametrize("name", ["sen2_mtc_new", "sen12mscrts_ea"])
def test_a_paper_preset_is_guided_by_the_papers_autoencoder(name: str) -> None:
    config = get_preset(name)
    bands = len(config.network.bands)
    with pytest.warns(UserWarning, match="WITHOUT trained weights"):
        guide = make_guide(config.sampling.guide, bands=bands)
    assert isinstance(guide, LearnedGuide)
    assert guide.network.config == MaskedAutoencoderConfig.paper(bands)


def test_rows_of_the_tables_are_sampled_as_printed() -> None:
    for dataset, own in ((paper.SEN2, "4+1"), (paper.TS, "5+1")):
        rows = {name: {row.name: row for row in TABLES[name].rows[dataset]} for name in ("table5", "table6")}
        assert {row.steps for row in rows["table5"].values()} == set(paper.TABLE_5[dataset])
        guides = {name: (row.steps, row.guide) for name, row in rows["table6"].items()}
        assert guides == {
            "no-resampling": (f"{own[0]}+0", None),
            "no-correction": (own, "none"),
            "mean-guided": (own, "mean"),
            "conv-guided": (own, "conv"),
            "mae-guided": (own, "mae"),
        }
        for name in ("table3", "table4", "loss-weights"):
            assert {row.steps for row in TABLES[name].rows[dataset]} == {"5"}


def test_the_run_on_the_benchmark_keeps_the_papers_network_loss_and_rates() -> None:
    preset = resolve("sen2_mtc_new")
    run = resolve(Path(__file__).parents[1] / "benchmarks" / "triclear.yaml")
    changed = {line.split(":")[0] for line in differing_keys(preset, run) if not line.startswith("data.maker.")}
    assert changed == {
        *("model.name", "model.network.bands", "model.network.aux_bands", "model.diffusion.start"),
        *("train.epochs", "train.steps", "train.schedule_steps", "train.warmup"),
        *("train.batch_size", "train.accumulate", "train.crop", "train.precision"),
    }
    assert run.train.warmup * run.train.steps == preset.train.warmup * 50_000
    assert run.train.steps * run.train.batch_size == 400_000
