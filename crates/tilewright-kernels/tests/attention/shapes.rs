//! Decode, append and prefill in many shapes.

use crate::{case::Case, judge::check};

#[test]
fn decode_of_uneven_requests() {
    check(&Case::new(64, (4, 2), &[(1, 70), (1, 3), (1, 0), (1, 33)]).with(|case| case.seeds = 4));
}

#[test]
fn prefill_of_a_few_requests() {
    check(&Case::new(64, (2, 1), &[(70, 100), (20, 20)]));
}
