//! Merging attention states.

use crate::{
    real::{Real, assert_near, noise},
    simulate::{SEEDS, args, simulate},
};
use half::{bf16, f16};
use tilewright_kernels::attention::merge::{Merge, merge_state, merge_states};
use tilewright_ptx::sim::Memory;

/// One vector, half a warp with idle lanes, a lane for each vector, and several vectors a lane.
const DIMS: [usize; 6] = [8, 64, 80, 128, 256, 512];

/// A state of a head: values, and LSE in base 2.
type State = (Vec<f64>, f64);

fn merged(dim: usize, states: &[State]) -> State {
    if states.iter().any(|(_, lse)| lse.is_nan()) {
        return (vec![f64::NAN; dim], f64::NAN);
    }
    let max = states.iter().map(|state| state.1).fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return (vec![0.0; dim], max);
    }
    let sum: f64 = states.iter().map(|state| (state.1 - max).exp2()).sum();
    let weighed = |d: usize| states.iter().map(|(v, lse)| (lse - max).exp2() / sum * v[d]).sum();
    ((0..dim).map(weighed).collect(), max + sum.log2())
}

/// `count` states: values, and LSE of which some are empty, and some far from others.
fn states<T: Real>(count: usize, dim: usize, seed: u64) -> (Vec<T>, Vec<f32>) {
    let mut lse: Vec<f32> = noise::<f32>(count, seed).iter().map(|lse| lse * 20.0).collect();
    let mut v = noise::<T>(count * dim, seed + 1);
    for empty in (0..count).filter(|state| (state + seed as usize) % 5 < 2) {
        lse[empty] = f32::NEG_INFINITY;
        v[empty * dim..][..dim].fill(T::of(0.0));
    }
    (v, lse)
}

fn state<T: Real>((v, lse): &(Vec<T>, Vec<f32>), at: usize, dim: usize) -> State {
    (v[at * dim..][..dim].iter().map(|v| v.wide()).collect(), f64::from(lse[at]))
}

fn compare<T: Real>(what: &str, found: (&[T], f32), expected: &State) {
    // weights have an error of 2^-22 each; LSE of up to 20 are rounded to f32
    for (i, (&found, &expected)) in found.0.iter().zip(&expected.0).enumerate() {
        assert_near(&format!("{what}, element {i}"), found, expected, (4e-6, 1.0));
    }
    assert_near(&format!("{what}, lse"), found.1, expected.1, (1e-6, 1.0));
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Into {
    Elsewhere,
    First,
    Second,
}

fn two<T: Real>(dim: usize, rows: usize, (seed, into): (u64, Into)) {
    let config = Merge { head_dim: dim as u32 };
    let kernel = merge_state::<T>("merge_state", config).expect("a valid kernel");
    let (a, b) = (states::<T>(rows, dim, seed), states::<T>(rows, dim, seed + 2));
    let mut memory = Memory::new();
    let (a_at, b_at) = (
        (memory.alloc_from(&a.0), memory.alloc_from(&a.1)),
        (memory.alloc_from(&b.0), memory.alloc_from(&b.1)),
    );
    let to = match into {
        Into::Elsewhere => (memory.alloc(rows * dim * size_of::<T>()), memory.alloc(rows * 4)),
        Into::First => a_at,
        Into::Second => b_at,
    };
    let arguments = args(&[a_at.0, a_at.1, b_at.0, b_at.1, to.0, to.1], &[rows as u32], &[]);
    let what = format!("{dim} of {}, {rows} rows, {into:?}", T::PTX);
    simulate(&what, &kernel, ([config.ctas::<T>(rows as u32), 1, 1], &arguments), seed, &mut memory);
    let v: Vec<T> = memory.read(to.0, rows * dim).expect("values");
    let lse: Vec<f32> = memory.read(to.1, rows).expect("lse");
    for row in 0..rows {
        let expected = merged(dim, &[state(&a, row, dim), state(&b, row, dim)]);
        compare(&format!("{what}: row {row}"), (&v[row * dim..][..dim], lse[row]), &expected);
    }
}

#[test]
fn two_states() {
    for dim in DIMS {
        for into in [Into::Elsewhere, Into::First, Into::Second] {
            two::<bf16>(dim, 13, (0, into));
            two::<f16>(dim, 5, (1, into));
            two::<f32>(dim.min(256), 7, (2, into));
        }
    }
}

#[test]
fn two_states_whatever_the_timing() {
    (0..SEEDS).for_each(|seed| two::<bf16>(80, 11, (seed, Into::First)));
}

fn many<T: Real>(dim: usize, [rows, states_of_row, heads]: [usize; 3], seed: u64) {
    let config = Merge { head_dim: dim as u32 };
    let kernel = merge_states::<T>("merge_states", config).expect("a valid kernel");
    let all = states::<T>(rows * states_of_row * heads, dim, seed);
    let mut memory = Memory::new();
    let from = [memory.alloc_from(&all.0), memory.alloc_from(&all.1)];
    let count = rows * heads;
    let to = [memory.alloc(count * dim * size_of::<T>()), memory.alloc(count * 4)];
    let words = [count as u32, states_of_row as u32, heads as u32];
    let arguments = args(&[from, to].concat(), &words, &[]);
    let what = format!("{dim} of {}, {rows} rows, {states_of_row} states, {heads} heads", T::PTX);
    simulate(&what, &kernel, ([config.ctas::<T>(count as u32), 1, 1], &arguments), seed, &mut memory);
    let v: Vec<T> = memory.read(to[0], count * dim).expect("values");
    let lse: Vec<f32> = memory.read(to[1], count).expect("lse");
    for at in 0..count {
        let (row, head) = (at / heads, at % heads);
        let states = (0..states_of_row).map(|i| state(&all, (row * states_of_row + i) * heads + head, dim));
        let expected = merged(dim, &states.collect::<Vec<_>>());
        compare(&format!("{what}: row {row}, head {head}"), (&v[at * dim..][..dim], lse[at]), &expected);
    }
}

#[test]
fn any_number_of_states() {
    for states in [0, 1, 2, 4, 5, 9] {
        for dim in DIMS {
            many::<bf16>(dim, [3, states, 3], 0);
        }
        many::<f16>(128, [5, states, 1], 1);
        many::<f32>(64, [2, states, 8], 2);
    }
}

#[test]
fn any_number_of_states_whatever_the_timing() {
    (0..SEEDS).for_each(|seed| many::<bf16>(72, [3, 6, 3], seed));
}

#[test]
fn a_nan_among_lse_makes_nan() {
    for lse in [[f32::NAN, f32::NEG_INFINITY], [1.0, f32::NAN]] {
        let mut memory = Memory::new();
        let v = memory.alloc_from(&[1.0_f32; 8]);
        let from = memory.alloc_from(&lse);
        let to = [memory.alloc(16), memory.alloc(4), memory.alloc(16), memory.alloc(4)];
        let config = Merge { head_dim: 4 };
        let two = merge_state::<f32>("merge_state", config).expect("a valid kernel");
        let arguments = args(&[v, from, v + 16, from + 4, to[0], to[1]], &[1], &[]);
        simulate("two", &two, ([1, 1, 1], &arguments), 0, &mut memory);
        let many = merge_states::<f32>("merge_states", config).expect("a valid kernel");
        simulate(
            "many",
            &many,
            ([1, 1, 1], &args(&[v, from, to[2], to[3]], &[1, 2, 1], &[])),
            0,
            &mut memory,
        );
        for (at, len) in [(to[0], 4), (to[1], 1), (to[2], 4), (to[3], 1)] {
            let found: Vec<f32> = memory.read(at, len).expect("written");
            assert!(found.iter().all(|x| x.is_nan()), "{lse:?}: {found:?}");
        }
    }
}

#[test]
fn refuses_heads_that_are_no_vectors() {
    let error = |head_dim| merge_state::<bf16>("merge", Merge { head_dim }).expect_err("refused").to_string();
    assert_eq!(error(100), "kernel merge: head_dim = 100, expected a multiple of 8 in 8..=1024");
    let many = merge_states::<f32>("merges", Merge { head_dim: 1024 }).expect_err("refused").to_string();
    assert_eq!(many, "kernel merges: head_dim = 1024, expected a multiple of 4 in 4..=512");
}
