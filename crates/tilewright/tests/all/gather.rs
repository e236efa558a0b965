//! Row gather against its definition for all dtypes and strides; every error text.

use crate::arrays::{Array, DTYPES, Layout};
use tilewright::{Cpu, Dtype, Element, gather::gather_rows, with_dtype};

fn rounded(dtype: Dtype, value: f64) -> f64 {
    // every table value is an f32, so rounding from f32 is exact rounding
    with_dtype!(dtype, T => f64::from(T::from_f32(value as f32).to_f32()))
}

#[test]
fn gathered_rows_are_rounded_once() {
    for (seed, from) in (1..).zip(DTYPES) {
        for to in DTYPES {
            for layout in [Layout::Dense, Layout::Padded] {
                for (rows, width, ids) in [
                    (5, 33, &[4, 0, 0, 3][..]),
                    (1, 1, &[0, 0]),
                    (700, 64, &[699]),
                    (3, 8, &[]),
                    (2, 0, &[1]),
                ] {
                    let table = Array::random(from, &[rows, width], layout, seed);
                    let mut out = Array::zeros(to, &[ids.len(), width], layout);
                    gather_rows(&Cpu::with_threads(2).unwrap(), table.view(), ids, out.view_mut()).unwrap();
                    let values = table.values();
                    let row = |id: &i32| &values[*id as usize * width..][..width];
                    let expected: Vec<f64> = ids.iter().flat_map(row).map(|&x| rounded(to, x)).collect();
                    assert_eq!(out.values(), expected, "{from} to {to}, {layout:?}, {ids:?}");
                    assert!(out.gaps_untouched());
                }
            }
        }
    }
}

#[test]
fn gathered_rows_are_thread_invariant() {
    let table = Array::random(Dtype::Bf16, &[97, 129], Layout::Dense, 3);
    let ids: Vec<i32> = (0..400).map(|i| i * 31 % 97).collect();
    let run = |threads| {
        let mut out = Array::zeros(Dtype::F32, &[400, 129], Layout::Dense);
        gather_rows(&Cpu::with_threads(threads).unwrap(), table.view(), &ids, out.view_mut()).unwrap();
        out.bits()
    };
    assert_eq!(run(1), run(4));
}

#[test]
fn invalid_arguments_are_refused() {
    let refuse = |table: &Array, ids: &[i32], out: &mut Array| {
        let before = out.bits();
        let why = gather_rows(&Cpu::with_threads(1).unwrap(), table.view(), ids, out.view_mut()).unwrap_err();
        assert_eq!(out.bits(), before, "nothing was written");
        why.to_string()
    };
    let array = |shape: &[usize]| Array::zeros(Dtype::F32, shape, Layout::Dense);
    let (table, mut out) = (array(&[3, 4]), array(&[2, 4]));
    for (ids, text) in
        [([0, 3], "ids[1] = 3"), ([-1, 0], "ids[0] = -1"), ([i32::MAX, 0], "ids[0] = 2147483647")]
    {
        let text = format!("gather.gather_rows: {text} is not in 0..3, the rows of table");
        assert_eq!(refuse(&table, &ids, &mut out), text);
    }
    assert_eq!(
        refuse(&array(&[3, 4, 1]), &[0, 1], &mut out),
        "gather.gather_rows: table has shape [3, 4, 1], expected [rows, width]"
    );
    assert_eq!(
        refuse(&table, &[0], &mut out),
        "gather.gather_rows: out has shape [2, 4], expected [ids, width] = [1, 4]"
    );
}
