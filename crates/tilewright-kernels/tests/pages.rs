//! docs/write-a-kernel.md: its first listing is the example, and what it quotes is what is printed.

#[allow(dead_code, reason = "the example's `main` prints what is compared here")]
#[path = "../examples/row_rmsnorm.rs"]
mod row_rmsnorm;

use row_rmsnorm::{rmsnorm, simulated, without_barrier};
use tilewright_ptx::{
    sim::Report,
    text::{ptx, without_source_lines},
};

const PAGE: &str = include_str!("../../../docs/write-a-kernel.md");
const EXAMPLE: &str = include_str!("../examples/row_rmsnorm.rs");

/// The fenced listings of a kind.
fn listings(kind: &str) -> Vec<&'static str> {
    let fence = format!("\n```{kind}\n");
    let ends =
        |listing: &'static str| listing.split_inclusive("```\n").next().unwrap().trim_end_matches("```\n");
    let found: Vec<&str> = PAGE.split(fence.as_str()).skip(1).map(ends).collect();
    assert!(!found.is_empty(), "the page has no listing of `{kind}`");
    found
}

/// Every listing of a kind is an excerpt of `whole`.
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
fn the_ptx_is_what_is_printed() {
    let text = ptx(&rmsnorm(128).unwrap(), 80).unwrap();
    quotes("ptx", &without_source_lines(&text));
}

#[test]
fn the_report_is_that_of_seed_1_and_almost_that_of_others() {
    let kernel = rmsnorm(128).unwrap();
    let first = simulated(&kernel, 1).unwrap();
    quotes("report", &format!("{first:#?}\n"));
    for seed in 2..8 {
        let other = simulated(&kernel, seed).unwrap();
        assert_eq!(first, Report { warp_instructions: first.warp_instructions, ..other });
    }
}

#[test]
fn the_faults_are_what_the_simulator_says() {
    let wrong = without_barrier(&rmsnorm(128).unwrap());
    let told = (0..8).map(|seed| format!("seed {seed}: {}\n", simulated(&wrong, seed).unwrap_err()));
    quotes("fault", &told.collect::<String>());
}

#[test]
fn the_budgets_are_those_of_the_gate() {
    quotes("csv", include_str!("../budgets.csv"));
}
