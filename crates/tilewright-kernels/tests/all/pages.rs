//! docs/write-a-kernel.md: its first listing is the example, and its quotes are excerpts of real output.

#[allow(dead_code, reason = "the example's `main` prints what is compared here")]
#[path = "../../examples/row_rmsnorm.rs"]
mod row_rmsnorm;

use row_rmsnorm::{rmsnorm, simulated, without_barrier};
use tilewright_ptx::{
    Report,
    text::{ptx, without_source_lines},
};

const PAGE: &str = include_str!("../../../../docs/write-a-kernel.md");
const EXAMPLE: &str = include_str!("../../examples/row_rmsnorm.rs");

/// Fenced listings of a kind.
fn listings(kind: &str) -> Vec<&'static str> {
    let fence = format!("\n```{kind}\n");
    let ends =
        |listing: &'static str| listing.split_inclusive("```\n").next().unwrap().trim_end_matches("```\n");
    let found: Vec<&str> = PAGE.split(fence.as_str()).skip(1).map(ends).collect();
    assert!(!found.is_empty(), "the page has no listing of `{kind}`");
    found
}

/// Checks that every listing of a kind is an excerpt of `whole`.
fn quotes(kind: &str, whole: &str) {
    for listing in listings(kind) {
        assert!(whole.contains(listing), "the page quotes\n{listing}which is not in\n{whole}");
    }
}

#[test]
fn the_first_listing_is_the_example() {
    assert_eq!(listings("rust")[0], EXAMPLE);
}

#[test]
fn ptx_listings_match() {
    let text = ptx(&rmsnorm(128).unwrap(), 80).unwrap();
    quotes("ptx", &without_source_lines(&text));
}

#[test]
fn report_listing_matches_seed_1_and_other_seeds_differ_in_warp_instructions_only() {
    let kernel = rmsnorm(128).unwrap();
    let first = simulated(&kernel, 1).unwrap();
    quotes("report", &format!("{first:#?}\n"));
    for seed in 2..8 {
        let other = simulated(&kernel, seed).unwrap();
        assert_eq!(first, Report { warp_instructions: first.warp_instructions, ..other });
    }
}

#[test]
fn fault_listings_match() {
    let wrong = without_barrier(&rmsnorm(128).unwrap());
    let reports = (0..8).map(|seed| format!("seed {seed}: {}\n", simulated(&wrong, seed).unwrap_err()));
    quotes("fault", &reports.collect::<String>());
}

#[test]
fn budget_listings_match() {
    quotes("csv", include_str!("../../budgets.csv"));
}
