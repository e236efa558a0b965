//! Integration tests of the command line and of the bench definitions, in one binary to link only once.

mod bench_definitions;
mod cli_bench;
mod cli_doctor;
mod cli_generate;
mod cli_kernels;
mod cli_plan;
#[path = "../../crates/tilewright-serve/tests/all/fixtures.rs"]
mod fixtures;
mod output;
