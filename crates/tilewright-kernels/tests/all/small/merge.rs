//! Merging attention states.

use super::simulate::{SEEDS, simulate};
use crate::real::{Real, assert_near, noise};
use half::{bf16, f16};
use tilewright::Dtype;
use tilewright_kernels::attention::kernel::merge::{MergeInputs, MergeParams, StateTensor as PlaceOf, merge};
use tilewright_ptx::sim::Memory;

/// One vector, a half warp with idle lanes, one vector per lane, several vectors per lane.
const DIMS: [usize; 8] = [8, 64, 80, 128, 256, 512, 5, 300];

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

/// `count` states; some are empty, some have distant LSEs.
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
    // weights have an error of 2^-22; LSEs of up to 20 are rounded to f32
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

/// Dense states: `dim` values per head, `heads` heads per row, and their LSEs.
fn place(at: [u64; 2], heads: usize, dim: usize) -> PlaceOf {
    let [row, dim] = [heads * dim, dim].map(|n| n as u64);
    PlaceOf { v: at[0], v_strides: [row, dim, 1], lse: at[1], lse_strides: [heads as u64, 1] }
}

fn launch(what: &str, call: MergeParams, seed: u64, memory: &mut Memory) {
    let config = call.config().expect("a head that registers hold");
    let kernel = merge("merge", config).expect("a valid kernel");
    let (grid, args) = call.launch(config);
    simulate(&format!("{what} {call:?}"), &kernel, (grid, &args), seed, memory);
}

fn merge_two<T: Real>(dim: usize, rows: usize, (seed, into): (u64, Into)) {
    let (a, b) = (states::<T>(rows, dim, seed), states::<T>(rows, dim, seed + 2));
    let mut memory = Memory::new();
    let [a_at, b_at] = [&a, &b].map(|(v, lse)| [memory.alloc_from(v), memory.alloc_from(lse)]);
    let to = match into {
        Into::Elsewhere => [memory.alloc(rows * dim * size_of::<T>()), memory.alloc(rows * 4)],
        Into::First => a_at,
        Into::Second => b_at,
    };
    let call = MergeParams {
        dtype: T::DTYPE,
        shape: [rows as u32, 1, dim as u32],
        states: MergeInputs::Pair([a_at, b_at].map(|at| place(at, 1, dim))),
        out: place(to, 1, dim),
    };
    let what = format!("{dim} of {}, {rows} rows, {into:?}", T::PTX);
    launch(&what, call, seed, &mut memory);
    let v: Vec<T> = memory.read(to[0], rows * dim).expect("values");
    let lse: Vec<f32> = memory.read(to[1], rows).expect("lse");
    for row in 0..rows {
        let expected = merged(dim, &[state(&a, row, dim), state(&b, row, dim)]);
        compare(&format!("{what}: row {row}"), (&v[row * dim..][..dim], lse[row]), &expected);
    }
}

#[test]
fn two_states() {
    for dim in DIMS {
        for into in [Into::Elsewhere, Into::First, Into::Second] {
            merge_two::<bf16>(dim, 13, (0, into));
            merge_two::<f16>(dim, 5, (1, into));
            merge_two::<f32>(dim.min(256), 7, (2, into));
        }
    }
}

#[test]
fn two_states_with_many_seeds() {
    (0..SEEDS).for_each(|seed| merge_two::<bf16>(80, 11, (seed, Into::First)));
}

/// Parameters for dense states.
fn call_many(
    dtype: Dtype,
    dim: usize,
    [rows, states, heads]: [usize; 3],
    (from, to): ([u64; 2], [u64; 2]),
) -> MergeParams {
    let strides = [heads * dim, heads].map(|stride| stride as u64);
    let mut first = place(from, heads, dim);
    first.v_strides[0] *= states as u64;
    first.lse_strides[0] *= states as u64;
    let states = MergeInputs::Strided { first, count: states as u32, strides };
    MergeParams { dtype, shape: [rows, heads, dim].map(|n| n as u32), states, out: place(to, heads, dim) }
}

fn merge_many<T: Real>(dim: usize, [rows, states_of_row, heads]: [usize; 3], seed: u64) {
    let all = states::<T>(rows * states_of_row * heads, dim, seed);
    let mut memory = Memory::new();
    let from = [memory.alloc_from(&all.0), memory.alloc_from(&all.1)];
    let count = rows * heads;
    let to = [memory.alloc(count * dim * size_of::<T>()), memory.alloc(count * 4)];
    let what = format!("{dim} of {}, {rows} rows, {states_of_row} states, {heads} heads", T::PTX);
    launch(&what, call_many(T::DTYPE, dim, [rows, states_of_row, heads], (from, to)), seed, &mut memory);
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
            merge_many::<bf16>(dim, [3, states, 3], 0);
        }
        merge_many::<f16>(128, [5, states, 1], 1);
        merge_many::<f32>(64, [2, states, 8], 2);
    }
}

#[test]
fn any_number_of_states_with_many_seeds() {
    (0..SEEDS).for_each(|seed| merge_many::<bf16>(72, [3, 6, 3], seed));
}

/// The spacing of f32 at 1e5 is 0.008: a rounded LSE per pair of states would lose the weights.
#[test]
fn many_equal_states_with_a_large_lse() {
    const STATES: usize = 1000;
    let v = noise::<f32>(STATES * 8, 3);
    let mut memory = Memory::new();
    let from = [memory.alloc_from(&v), memory.alloc_from(&[1e5_f32; STATES])];
    let to = [memory.alloc(8 * 4), memory.alloc(4)];
    launch("large", call_many(Dtype::F32, 8, [1, STATES, 1], (from, to)), 0, &mut memory);
    let found: Vec<f32> = memory.read(to[0], 8).expect("values");
    let lse: Vec<f32> = memory.read(to[1], 1).expect("lse");
    let mean = |d: usize| v.iter().skip(d).step_by(8).map(|&v| f64::from(v)).sum::<f64>() / STATES as f64;
    for (d, &found) in found.iter().enumerate() {
        // 1,000 sums and as many weights with an error of 2^-22
        assert_near(&format!("element {d}"), found, mean(d), (4e-6, 30.0));
    }
    assert_near("lse", lse[0], 1e5 + (STATES as f64).log2(), (4e-6, 1e3));
}

#[test]
fn a_nan_among_lse_makes_nan() {
    for lse in [[f32::NAN, f32::NEG_INFINITY], [1.0, f32::NAN]] {
        let mut memory = Memory::new();
        let v = memory.alloc_from(&[1.0_f32; 8]);
        let from = memory.alloc_from(&lse);
        let to = [memory.alloc(16), memory.alloc(4), memory.alloc(16), memory.alloc(4)];
        let merge_two = [[v, from], [v + 16, from + 4]].map(|at| place(at, 1, 4));
        let out = place([to[0], to[1]], 1, 4);
        let call =
            MergeParams { dtype: Dtype::F32, shape: [1, 1, 4], states: MergeInputs::Pair(merge_two), out };
        launch("two", call, 0, &mut memory);
        let at = ([v, from], [to[2], to[3]]);
        launch("many", call_many(Dtype::F32, 4, [1, 2, 1], at), 0, &mut memory);
        for (at, len) in [(to[0], 4), (to[1], 1), (to[2], 4), (to[3], 1)] {
            let found: Vec<f32> = memory.read(at, len).expect("written");
            assert!(found.iter().all(|x| x.is_nan()), "{lse:?}: {found:?}");
        }
    }
}
