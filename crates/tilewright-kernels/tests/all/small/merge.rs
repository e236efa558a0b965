//! Merging attention states.

use super::simulate::{SEEDS, simulate};
use crate::real::{Real, assert_near, noise};
use half::{bf16, f16};
use tilewright::Dtype;
use tilewright_kernels::attention::kernel::merge::{MergeInputs, MergeParams, StateTensor as PlaceOf, merge};
use tilewright_ptx::sim::Memory;

/// One vector, a half warp with idle lanes, one vector per lane, several vectors per lane.
const DIMS: [usize; 9] = [8, 64, 80, 128, 256, 512, 808, 5, 300];

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

/// The order of dense states.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    /// `[rows, heads]`
    Rows,
    /// `[heads, rows]`
    Heads,
}

impl Order {
    /// Strides of rows and heads, in states.
    fn strides(self, [rows, heads]: [usize; 2]) -> [u64; 2] {
        match self {
            Self::Rows => [heads as u64, 1],
            Self::Heads => [1, rows as u64],
        }
    }
}

/// Elements of heads of this length are not adjacent: `[dim, states]`.
const STRIDED_DIM: usize = 300;

/// Strides of states and of elements, among `count` states.
fn v_strides(count: usize, dim: usize) -> [u64; 2] {
    if dim == STRIDED_DIM { [1, count as u64] } else { [dim as u64, 1] }
}

/// Values in memory order, from the order `[states, dim]`, and the reverse.
fn to_memory<T: Copy>(v: &[T], dim: usize) -> Vec<T> {
    let columns = if dim == STRIDED_DIM { dim } else { v.len() };
    (0..v.len()).map(|at| v[at * columns % v.len() + at / (v.len() / columns)]).collect()
}
fn from_memory<T: Copy>(v: &[T], dim: usize) -> Vec<T> {
    let columns = if dim == STRIDED_DIM { v.len() / dim } else { v.len() };
    (0..v.len()).map(|at| v[at * columns % v.len() + at / (v.len() / columns)]).collect()
}

/// Dense states of `dim` values per head, and their LSEs.
fn place(at: [u64; 2], (shape, order): ([usize; 2], Order), dim: usize) -> PlaceOf {
    let ([row, head], [state, element]) = (order.strides(shape), v_strides(shape[0] * shape[1], dim));
    PlaceOf {
        v: at[0],
        v_strides: [row * state, head * state, element],
        lse: at[1],
        lse_strides: [row, head],
    }
}

fn launch(what: &str, call: MergeParams, seed: u64, memory: &mut Memory) {
    let config = call.config().expect("a head that registers hold");
    let kernel = merge("merge", config).expect("a valid kernel");
    let (grid, args) = call.launch(config);
    simulate(&format!("{what} {call:?}"), &kernel, (grid, &args), seed, memory);
}

fn merge_two<T: Real>(dim: usize, shape: [usize; 2], (seed, into): (u64, Into)) {
    let states_of_tensor = shape[0] * shape[1];
    let [a, b] = [seed, seed + 6].map(|seed| states::<T>(states_of_tensor, dim, seed));
    let mut memory = Memory::new();
    let [a_at, b_at] =
        [&a, &b].map(|(v, lse)| [memory.alloc_from(&to_memory(v, dim)), memory.alloc_from(lse)]);
    let to = match into {
        Into::Elsewhere => {
            [memory.alloc(states_of_tensor * dim * size_of::<T>()), memory.alloc(states_of_tensor * 4)]
        }
        Into::First => a_at,
        Into::Second => b_at,
    };
    let order = (shape, if into == Into::Second { Order::Heads } else { Order::Rows });
    let call = MergeParams {
        dtype: T::DTYPE,
        shape: [shape[0], shape[1], dim].map(|n| n as u32),
        states: MergeInputs::Pair([a_at, b_at].map(|at| place(at, order, dim))),
        out: place(to, order, dim),
    };
    let what = format!("{dim} of {}, {shape:?} states, {into:?}", T::PTX);
    launch(&what, call, seed, &mut memory);
    let v: Vec<T> = from_memory(&memory.read(to[0], states_of_tensor * dim).expect("values"), dim);
    let lse: Vec<f32> = memory.read(to[1], states_of_tensor).expect("lse");
    for at in 0..states_of_tensor {
        let expected = merged(dim, &[state(&a, at, dim), state(&b, at, dim)]);
        compare(&format!("{what}: state {at}"), (&v[at * dim..][..dim], lse[at]), &expected);
    }
}

#[test]
fn two_states() {
    for dim in DIMS {
        for into in [Into::Elsewhere, Into::First, Into::Second] {
            merge_two::<bf16>(dim, [7, 2], (0, into));
            merge_two::<f16>(dim, [2, 3], (1, into));
            merge_two::<f32>(dim.min(160), [7, 1], (2, into));
        }
    }
}

#[test]
fn two_states_with_many_seeds() {
    (0..SEEDS).for_each(|seed| merge_two::<bf16>(80, [11, 1], (seed, Into::First)));
}

/// Parameters for dense states.
fn call_many(
    dtype: Dtype,
    dim: usize,
    ([rows, states, heads], order): ([usize; 3], Order),
    (from, to): ([u64; 2], [u64; 2]),
) -> MergeParams {
    let place = |at| place(at, ([rows, heads], order), dim);
    let [state, element] = v_strides(rows * states * heads, dim);
    let (major, of_state) = if order == Order::Rows { (0, heads as u64) } else { (1, rows as u64) };
    let mut first = place(from);
    first.lse_strides[major] *= states as u64;
    first.v_strides = [first.lse_strides[0] * state, first.lse_strides[1] * state, element];
    let strides = [of_state * state, of_state];
    let states = MergeInputs::Strided { first, count: states as u32, strides };
    MergeParams { dtype, shape: [rows, heads, dim].map(|n| n as u32), states, out: place(to) }
}

fn merge_many<T: Real>(dim: usize, [rows, states_of_row, heads]: [usize; 3], (seed, order): (u64, Order)) {
    let all = states::<T>(rows * states_of_row * heads, dim, seed);
    let mut memory = Memory::new();
    let from = [memory.alloc_from(&to_memory(&all.0, dim)), memory.alloc_from(&all.1)];
    let count = rows * heads;
    let to = [memory.alloc(count * dim * size_of::<T>()), memory.alloc(count * 4)];
    let what = format!("{dim} of {}, {rows} rows, {states_of_row} states, {heads} heads, {order:?}", T::PTX);
    let sizes = ([rows, states_of_row, heads], order);
    launch(&what, call_many(T::DTYPE, dim, sizes, (from, to)), seed, &mut memory);
    let v: Vec<T> = from_memory(&memory.read(to[0], count * dim).expect("values"), dim);
    let lse: Vec<f32> = memory.read(to[1], count).expect("lse");
    let minor = if order == Order::Rows { heads } else { rows };
    for at in 0..count {
        let states = (0..states_of_row)
            .map(|i| state(&all, (at / minor * states_of_row + i) * minor + at % minor, dim));
        let expected = merged(dim, &states.collect::<Vec<_>>());
        compare(&format!("{what}: state {at}"), (&v[at * dim..][..dim], lse[at]), &expected);
    }
}

#[test]
fn any_number_of_states() {
    for states in [0, 1, 2, 4, 7, 9] {
        for dim in DIMS {
            merge_many::<bf16>(dim, [2, states, 3], (0, Order::Rows));
            merge_many::<f16>(dim, [3, states, 2], (1, Order::Heads));
        }
        merge_many::<f32>(64, [2, states, 8], (2, Order::Rows));
        merge_many::<f32>(160, [3, states, 1], (3, Order::Rows));
    }
}

#[test]
fn any_number_of_states_with_many_seeds() {
    (0..SEEDS).for_each(|seed| merge_many::<bf16>(72, [3, 6, 3], (seed, Order::Rows)));
}

/// The spacing of f32 at 1e5 is 0.008: a rounded LSE per pair of states would lose the weights.
#[test]
fn many_equal_states_with_a_large_lse() {
    const STATES: usize = 1000;
    let v = noise::<f32>(STATES * 8, 3);
    let mut memory = Memory::new();
    let from = [memory.alloc_from(&v), memory.alloc_from(&[1e5_f32; STATES])];
    let to = [memory.alloc(8 * 4), memory.alloc(4)];
    launch("large", call_many(Dtype::F32, 8, ([1, STATES, 1], Order::Rows), (from, to)), 0, &mut memory);
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
        let merge_two = [[v, from], [v + 16, from + 4]].map(|at| place(at, ([1, 1], Order::Rows), 4));
        let out = place([to[0], to[1]], ([1, 1], Order::Rows), 4);
        let call =
            MergeParams { dtype: Dtype::F32, shape: [1, 1, 4], states: MergeInputs::Pair(merge_two), out };
        launch("two", call, 0, &mut memory);
        let at = ([v, from], [to[2], to[3]]);
        launch("many", call_many(Dtype::F32, 4, ([1, 2, 1], Order::Rows), at), 0, &mut memory);
        for (at, len) in [(to[0], 4), (to[1], 1), (to[2], 4), (to[3], 1)] {
            let found: Vec<f32> = memory.read(at, len).expect("written");
            assert!(found.iter().all(|x| x.is_nan()), "{lse:?}: {found:?}");
        }
    }
}
