//! Errors of `Batch::with_levels` and `Batch::with_shared_prefixes`.

use super::{plan::plan_refuses, refused};
use tilewright::{
    Attention, Batch, Cpu, HeadDim, Heads, PageTable, Problem, Result,
    attention::{Index, Level, Split},
};

/// Requests with rows 0, 1..3 and 3, each with its own page of 4 tokens.
fn batch() -> Batch<'static> {
    Batch::paged(&[0, 1, 3, 4], PageTable::new(&[0, 1, 2, 3], &[0, 1, 2], &[1, 2, 3], 4))
}

/// A level of one group.
fn level<'a>(
    qo_indptr: &'a [i64; 2],
    indices: &'a [i64],
    last_page_len: &'a [i64; 1],
    page_size: usize,
) -> Level<'a> {
    let indptr: &'static [i64; 2] = [&[0, 0], &[0, 1], &[0, 2]][indices.len()];
    Level { qo_indptr: qo_indptr.into(), table: PageTable::new(indptr, indices, last_page_len, page_size) }
}

#[track_caller]
fn levels_refused(levels: &[Level<'_>], text: &str) {
    plan_refuses(&batch().with_levels(levels), text);
}

#[test]
fn groups_that_are_not_whole_requests() {
    levels_refused(
        &[level(&[0, 2], &[7, 8], &[4], 4)],
        "level 0: group 0: rows 0..2 cut request 1, which has rows 1..3",
    );
    let qo_indptr = [0, 2, 4];
    let table = PageTable::new(&[0, 0, 2], &[7, 8], &[0, 4], 4);
    levels_refused(
        &[Level { qo_indptr: (&qo_indptr).into(), table }],
        "level 0: group 1: rows 2..4 cut request 1, which has rows 1..3",
    );
    let beyond = "level 0: qo_indptr ends at 5, the batch has 4 query rows";
    levels_refused(&[level(&[0, 5], &[7, 8], &[4], 4)], beyond);
    let most = "level 0: qo_indptr ends at 9223372036854775807, the batch has 4 query rows";
    levels_refused(&[level(&[0, i64::MAX], &[7, 8], &[4], 4)], most);
}

#[test]
fn groups_with_unequal_keys_before_them() {
    let (first, all) = (level(&[0, 1], &[7, 8], &[4], 4), level(&[0, 4], &[9], &[4], 4));
    let text = "level 1: group 0: requests 0 and 1 have 8 and 0 keys in earlier levels";
    levels_refused(&[first, all], text);
}

#[test]
fn levels_with_pages_that_do_not_fit() {
    levels_refused(&[level(&[0, 4], &[7], &[8], 8)], "level 0: page_size = 8, the batch has 4");
    let good = level(&[0, 4], &[7, 8], &[4], 4);
    levels_refused(
        &[good, level(&[0, 4], &[7, 8], &[3], 4)],
        "level 1: group 0: last_page_len = 3, expected full pages of 4",
    );
    let ragged = Batch::ragged(&[0, 1, 3, 4], &[0, 3, 4, 9]);
    let text = "level 0: keys in pages, but those of the batch are ragged";
    plan_refuses(&ragged.with_levels(&[good]), text);
    let text = "shared prefixes are found by their pages, but the keys are ragged";
    plan_refuses(&ragged.with_shared_prefixes(), text);
}

#[test]
fn levels_that_are_malformed() {
    let table = |indptr: &[i64], indices: &[i64], last: &[i64], text: &str| {
        let level = Level { qo_indptr: (&[0, 1, 3]).into(), table: PageTable::new(indptr, indices, last, 4) };
        levels_refused(&[level], &format!("level 0: {text}"));
    };
    table(&[0, 1, 2], &[0, -7], &[4, 4], "group 1: page = -7 is negative");
    table(&[0, 1, 2], &[0, 1], &[4, 5], "group 1: last_page_len = 5 is not in 1..=4");
    table(&[0, 2, 2], &[0, 1], &[4, 4], "group 1: last_page_len = 4, expected 0 for a group without pages");
    table(&[0, 2, 1], &[0], &[4, 4], "group 1: kv indptr decreases from 2 to 1");
    table(&[0, 1, 3], &[0, 1], &[4, 4], "kv indptr ends at 3, but indices has 2 pages");
    table(&[0, 1], &[0], &[4, 4], "kv indptr has 2 entries, expected num_groups + 1 = 3");
    table(&[0, 1, 2], &[0, 1 << 31], &[4, 4], "page = 2147483648 does not fit in 32 bits");
    levels_refused(&[level(&[0, 4], &[7], &[1], 0)], "level 0: page_size = 0, expected at least 1");
    let rows = |qo_indptr: Index<'_>, text: &str| {
        let table = PageTable::new(&[0, 1], &[7], &[4], 4);
        levels_refused(&[Level { qo_indptr, table }], &format!("level 0: {text}"));
    };
    rows((&[0, 1, 4]).into(), "qo_indptr has 3 entries, expected num_groups + 1 = 2");
    rows((&[1, 4]).into(), "qo_indptr starts at 1, expected 0");
    rows((&[0, -4]).into(), "group 0: qo_indptr decreases from 0 to -4");
}

#[test]
fn levels_with_more_keys_than_positions() {
    let most = "the most is 2147483647";
    let huge = i64::MAX as usize;
    let own = Batch::paged(&[0, 1], PageTable::new(&[0, 1], &[0], &[1], huge));
    let level = level(&[0, 1], &[7, 8], &[i64::MAX], huge);
    let text = format!("1 query rows and a longest request of 18446744073709551615 tokens, {most}");
    plan_refuses(&own.with_levels(&[level]), &text);
    plan_refuses(&own.with_levels(&[level, level]), &text);
    let page = 1_i64 << 30;
    let own = Batch::paged(&[0, 1], PageTable::new(&[0, 1], &[0], &[1], page as usize));
    let (rows, pages, last) = ([0, 1], [7, 8], [page]);
    let level = self::level(&rows, &pages, &last, page as usize);
    let text = format!("1 query rows and a longest request of 2147483649 tokens, {most}");
    plan_refuses(&own.with_levels(&[level]), &text);
}

/// One row per request, with one own key after a page that all share.
fn plan_shared(heads: Heads, requests: usize, page_size: i64, split: Split) -> Result<usize> {
    let problem = Problem::builder(heads, HeadDim::same(8)).build().expect("it is sound");
    let attention = Attention::new(problem, Cpu::with_threads(1).unwrap()).expect("the CPU can do it");
    let indptr: Vec<i64> = (0..=requests as i64).collect();
    let (indices, last_page_len) = (vec![1; requests], vec![1; requests]);
    let table = PageTable::new(&indptr, &indices, &last_page_len, page_size as usize);
    let (rows, last) = ([0, requests as i64], [page_size]);
    let levels = [level(&rows, &[0], &last, page_size as usize)];
    let batch = Batch::paged(&indptr, table).with_levels(&levels);
    attention.plan_with(&batch, split).map(|plan| plan.workspace_bytes())
}

#[test]
fn levels_with_too_many_states() {
    let wide = Heads { qo: 65536, kv: 1 };
    let text = "13107200000 partial rows, the most is 4294967295: longer pieces or fewer levels are needed";
    for split in [Split::Balanced, Split::Never] {
        refused(plan_shared(wide, 100_000, 64, split), &format!("attention.plan: {text}"));
    }
    let one = Heads { qo: 1, kv: 1 };
    let text = "at least 67109120 states to merge, the most is 67108864: longer pieces are needed";
    let pieces = plan_shared(one, 300, 1 << 24, Split::Fixed { tokens: 64 });
    refused(pieces, &format!("attention.plan: {text}"));
    assert!(plan_shared(one, 300, 1 << 24, Split::Balanced).is_ok());
}
