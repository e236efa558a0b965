//! Covering arrays: few rows in which every pair of values of two factors occurs.

use std::collections::BTreeSet;

/// Rows with a value below `levels[f]` for each factor `f`. Every pair of values of two factors occurs in a row.
///
/// Each row starts with a pair that no row has yet. Each other factor takes the value that adds the most such pairs.
pub(crate) fn pairwise(levels: &[usize]) -> Vec<Vec<usize>> {
    let mut missing = pairs(levels);
    let mut rows = Vec::new();
    while let Some(&[f, x, g, y]) = missing.first() {
        let mut row = vec![None; levels.len()];
        (row[f], row[g]) = (Some(x), Some(y));
        for factor in (0..levels.len()).filter(|factor| ![f, g].contains(factor)) {
            let gain = |value: usize| {
                let set = row.iter().enumerate().filter_map(|(other, value)| Some((other, (*value)?)));
                set.filter(|other| missing.contains(&pair((factor, value), *other))).count()
            };
            // ties rotate, so that values of factors with few levels alternate
            let values = (0..levels[factor]).map(|value| (value + rows.len()) % levels[factor]);
            let best = values.max_by_key(|value| gain(*value));
            row[factor] = best;
        }
        let row: Vec<usize> = row.into_iter().flatten().collect();
        missing.retain(|&[f, x, g, y]| row[f] != x || row[g] != y);
        rows.push(row);
    }
    rows
}

/// All pairs of values of two factors.
fn pairs(levels: &[usize]) -> BTreeSet<[usize; 4]> {
    let values = |factor: usize| (0..levels[factor]).map(move |value| (factor, value));
    let factors = 0..levels.len();
    factors
        .flat_map(|f| (0..f).map(move |g| (f, g)))
        .flat_map(|(f, g)| values(f).flat_map(move |x| values(g).map(move |y| pair(x, y))))
        .collect()
}

/// A pair of `(factor, value)`, the lower factor first.
fn pair(a: (usize, usize), b: (usize, usize)) -> [usize; 4] {
    let (a, b) = (a.min(b), a.max(b));
    [a.0, a.1, b.0, b.1]
}

#[test]
fn every_pair_of_values_occurs_in_a_row() {
    for levels in [&[3, 3, 11, 7, 2, 4][..], &[2, 2], &[5, 1, 4], &[2; 12]] {
        let rows = pairwise(levels);
        for [f, x, g, y] in pairs(levels) {
            assert!(rows.iter().any(|row| row[f] == x && row[g] == y), "{levels:?}: {f} {x} {g} {y}");
        }
        let mut sizes = levels.to_vec();
        sizes.sort_unstable();
        let least: usize = sizes.iter().rev().take(2).product();
        assert!(rows.len() <= 3 * least, "{levels:?}: {} rows", rows.len());
    }
}
