//! Top-k selection in windows, with indices as offsets and as slots of page tables.

use super::top::scores;
use crate::arrays::{Array, DTYPES, Layout, random};
use tilewright::{
    Backend, Cpu, Dtype, Operator,
    reference::sampling::largest,
    sampling::{IndexMapping, PageMapping, TieBreak, TopKTransform},
};

crate::judge_backends!(
    mapped_indices_are_those_of_the_windows,
    what_lies_outside_of_rows_and_tables_is_skipped
);

/// Windows of lengths around `k` and of any alignment.
fn mapped_indices_are_those_of_the_windows<B: Backend>([backend]: &[B; 1]) {
    const ROWS: usize = 4;
    for dtype in DTYPES {
        for (max_len, k) in [(1, 1), (50, 7), (257, 20), (40, 64), (3000, 1100)] {
            for ties in [TieBreak::Lowest, TieBreak::Highest] {
                let scores = Array::new(dtype, &[ROWS, max_len], Layout::Padded, &scores(ROWS * max_len, 5));
                let starts: Vec<i32> = (0..ROWS).map(|row| (row * 5 % max_len) as i32).collect();
                let rest = |row: usize| max_len as i32 - starts[row];
                let lengths = [rest(0), rest(1).min(k as i32), 0, rest(3).min(k as i32 + 1)];
                let window = |row: usize| {
                    let (start, len) = (starts[row] as usize, lengths[row] as usize);
                    let values = scores.values()[row * max_len + start..][..len].to_vec();
                    let mut all = largest(&values, k.min(len), ties == TieBreak::Highest);
                    all.sort_unstable();
                    all
                };
                let expected: Vec<Vec<usize>> = (0..ROWS).map(window).collect();
                assert_maps(backend, &scores, (&lengths, &starts), (k, ties), &expected);
            }
        }
    }
}

/// Compares offsets and slots of pages, with and without the optional arrays.
fn assert_maps<B: Backend>(
    backend: &B,
    scores: &Array,
    (lengths, starts): (&[i32], &[i32]),
    (k, ties): (usize, TieBreak),
    expected: &[Vec<usize>],
) {
    let (rows, max_len) = (scores.shape[0], scores.shape[1]);
    let offsets: Vec<i32> = (0..rows as i32).map(|row| 1000 * row).collect();
    let (page_size, width) = (4, max_len / 4 + 3);
    let pages: Vec<i32> = (0..(rows * width) as i32).map(|i| i * 37 % 1009).collect();
    let table_rows: Vec<i32> = (0..rows as i32).rev().collect();
    let page_starts = [2, 0, 1, 2];
    for optional in [false, true] {
        let mappings = [
            IndexMapping::Offsets((&offsets).into()),
            IndexMapping::Pages(PageMapping {
                table: (&pages).into(),
                width,
                table_rows: optional.then_some((&table_rows).into()),
                starts: optional.then_some((&page_starts).into()),
                page_size,
            }),
        ];
        for (paged, mapping) in mappings.into_iter().enumerate() {
            let (mut indices, mut windows) = (vec![7; rows * k], vec![7; rows * k]);
            let transform = TopKTransform {
                scores: scores.view(),
                lengths: lengths.into(),
                starts: Some(starts.into()),
                k,
                ties,
                mapping,
                indices: (&mut indices).into(),
                window_indices: optional.then(|| (&mut windows).into()),
            };
            transform.run(backend).unwrap();
            let mapped = |row: usize, i: usize| {
                let table = if optional { rows - 1 - row } else { row };
                let entry = i / page_size + if optional { page_starts[row] as usize } else { 0 };
                match paged {
                    0 => offsets[row] + i as i32,
                    _ => pages[table * width + entry] * page_size as i32 + (i % page_size) as i32,
                }
            };
            let what = format!("{:?} k={k} {ties:?} paged {paged} optional {optional}", scores.shape);
            for (row, selected) in expected.iter().enumerate() {
                let padded = |of: &dyn Fn(usize) -> i32| {
                    let of = selected.iter().map(|&i| of(i)).chain(std::iter::repeat(-1));
                    of.take(k).collect::<Vec<_>>()
                };
                assert_eq!(indices[row * k..][..k], padded(&|i| mapped(row, i)), "{what}: row {row}");
                if optional {
                    assert_eq!(windows[row * k..][..k], padded(&|i| i as i32), "{what}: window {row}");
                }
            }
        }
    }
}

fn what_lies_outside_of_rows_and_tables_is_skipped<B: Backend>([backend]: &[B; 1]) {
    let mut values = random(6 * 8, 3);
    values[2 * 8 + 4] = f32::NAN;
    let scores = Array::new(Dtype::F32, &[6, 8], Layout::Dense, &values);
    // too long, negative, NaN, a start beyond the row, a negative start, a table that does not exist
    let (lengths, starts) = ([100, -1, 8, 8, 8, 8], [5, 0, 0, 9, -1, 0]);
    let entries = [[-1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]];
    let (table, table_rows) = ([3, -1, 5, 6], [0, 0, 0, 0, 0, 2]);
    let pages = |starts| PageMapping {
        table: (&table).into(),
        width: 2,
        table_rows: Some((&table_rows).into()),
        starts,
        page_size: 2,
    };
    let run = |mapping| {
        let mut indices = [7; 18];
        TopKTransform {
            scores: scores.view(),
            lengths: (&lengths).into(),
            starts: Some((&starts).into()),
            k: 3,
            ties: TieBreak::Lowest,
            mapping,
            indices: indices[..].as_mut().into(),
            window_indices: None,
        }
        .run(backend)
        .unwrap();
        indices
    };
    let none = [-1; 3];
    // the first entry is page 3, the second is not there, the third is in no table
    let found = run(IndexMapping::Pages(pages(None)));
    assert_eq!(found, [[6, 7, -1], none, none, none, none, none].concat()[..]);
    // a negative entry, and from entry 1 on a page that is not there, then an entry that belongs to the next table
    for starts in &entries {
        let found = run(IndexMapping::Pages(pages(Some(starts.into()))));
        assert_eq!(found[..3], none, "from entry {}", starts[0]);
    }
    let found = run(IndexMapping::Offsets((&[10, 0, 0, 0, 0, 0]).into()));
    assert_eq!(found[..15], [[10, 11, 12], none, none, none, none].concat()[..]);
}

#[test]
fn transforms_refuse_by_name() {
    let scores = Array::zeros(Dtype::F32, &[2, 8], Layout::Dense);
    let table = [0; 4];
    let pages = |width, page_size| {
        let table = (&table).into();
        IndexMapping::Pages(PageMapping { table, width, table_rows: None, starts: None, page_size })
    };
    let refuse = |k: usize, lengths: &[i32], mapping, len: usize| {
        let mut indices = vec![0; len];
        let transform = TopKTransform {
            scores: scores.view(),
            lengths: lengths.into(),
            starts: None,
            k,
            ties: TieBreak::Lowest,
            mapping,
            indices: (&mut indices).into(),
            window_indices: None,
        };
        let text = transform.run(&Cpu::with_threads(1).unwrap()).unwrap_err().to_string();
        text.strip_prefix("sampling.top_k_transform: ").expect("the operator").to_owned()
    };
    let offsets = || IndexMapping::Offsets((&[0, 0]).into());
    assert_eq!(refuse(0, &[8, 8], offsets(), 0), "k = 0, expected 1 to 2147483647");
    assert_eq!(refuse(3, &[8], offsets(), 6), "lengths has 1 elements, expected 2");
    assert_eq!(
        refuse(3, &[8, 8], IndexMapping::Offsets((&[0]).into()), 6),
        "offsets has 1 elements, expected 2"
    );
    assert_eq!(refuse(3, &[8, 8], offsets(), 5), "indices has 5 elements, expected 6");
    assert_eq!(refuse(3, &[8, 8], pages(3, 1), 6), "table has 4 elements, expected rows of width = 3");
    assert_eq!(refuse(3, &[8, 8], pages(2, 3), 6), "page_size = 3, expected a power of two up to 2^30");
    assert_eq!(refuse(3, &[8, 8], pages(4, 1), 6), "1 tables without table_rows, expected one per row: 2");
}
