//! Merge of attention states against the oracle: many, two, none, empty ones and NaN.

use crate::{Elements, Generator, half_ulp, round};
use tilewright::{
    Backend, Dtype, Operator,
    attention::{LSE_TO_NATURAL, StateMerge, merge_state, merge_states},
    reference::attention::merge,
};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const EMPTY: f32 = f32::NEG_INFINITY;

/// States of `rows` rows, `states` states and `heads` heads, in the layout of `merge_states`.
struct States {
    shape: [usize; 4],
    dtype: Dtype,
    o: Vec<f32>,
    lse: Vec<f32>,
}

impl States {
    /// Random states; some are empty, some have an LSE far from the others.
    fn random(shape: [usize; 4], dtype: Dtype, seed: u64) -> Self {
        let mut generator = Generator::new(seed);
        let [rows, states, heads, dim] = shape;
        let (mut o, mut lse) = (Vec::new(), Vec::new());
        for _ in 0..rows * states * heads {
            let choice = generator.below(8);
            let scale = if choice == 1 { 100.0 } else { 4.0 };
            lse.push(if choice == 0 { EMPTY } else { generator.real() * scale });
            let values = generator.reals(dim).into_iter();
            o.extend(values.map(|value| if choice == 0 { 0.0 } else { round(dtype, value) }));
        }
        Self { shape, dtype, o, lse }
    }

    /// Index of a state in `lse`; multiplied by dim, that of its first element in `o`.
    fn at(&self, row: usize, state: usize, head: usize) -> usize {
        (row * self.shape[1] + state) * self.shape[2] + head
    }

    fn state(&self, row: usize, state: usize, head: usize) -> (Vec<f64>, f64) {
        let (at, dim) = (self.at(row, state, head), self.shape[3]);
        (self.o[at * dim..(at + 1) * dim].iter().map(|o| f64::from(*o)).collect(), f64::from(self.lse[at]))
    }

    /// The oracle's merged state of a row and head.
    fn merged(&self, row: usize, head: usize) -> (Vec<f64>, f64) {
        let states: Vec<_> = (0..self.shape[1]).map(|state| self.state(row, state, head)).collect();
        let borrowed: Vec<_> = states.iter().map(|(o, lse)| (o.as_slice(), *lse)).collect();
        merge(&borrowed, self.shape[3])
    }

    fn merge_states<B: Backend>(&self, backend: &B) -> (Vec<f32>, Vec<f32>) {
        let [rows, states, heads, dim] = self.shape;
        let (o, lse) = (Elements::new(self.dtype, &self.o), Elements::new(Dtype::F32, &self.lse));
        let mut out = Elements::filled(self.dtype, rows * heads * dim, f32::NAN);
        let mut out_lse = Elements::filled(Dtype::F32, rows * heads, f32::NAN);
        let (values, lses) = (o.view(&self.shape), lse.view(&[rows, states, heads]));
        let (merged, merged_lse) = (out.view_mut(&[rows, heads, dim]), out_lse.view_mut(&[rows, heads]));
        merge_states(backend, values, lses, merged, merged_lse).expect("the tensors fit");
        (out.to_f32(), out_lse.to_f32())
    }

    /// Compares `(o, lse)` of all rows and heads with the oracle. Each state is scaled and added once with a few roundings,
    /// relative to the largest value involved.
    fn check(&self, (o, lse): (&[f32], &[f32])) {
        let [rows, states, heads, dim] = self.shape;
        for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let (truth, truth_lse) = self.merged(row, head);
            let steps = 4.0 * states as f64;
            let largest = self.o.iter().fold(0.0, |most: f64, o| most.max(f64::from(o.abs())));
            let at = row * heads + head;
            for (got, want) in o[at * dim..(at + 1) * dim].iter().zip(truth) {
                let tolerance = steps * half_ulp(Dtype::F32, largest) + half_ulp(self.dtype, want);
                assert!(close(*got, want, tolerance), "row {row}, head {head}: {got} instead of {want}");
            }
            let tolerance = steps * half_ulp(Dtype::F32, truth_lse.abs().clamp(1.0, 1e9));
            assert!(close(lse[at], truth_lse, tolerance), "lse: {} instead of {truth_lse}", lse[at]);
        }
    }
}

fn close(got: f32, want: f64, tolerance: f64) -> bool {
    let got = f64::from(got);
    got == want || (got.is_nan() && want.is_nan()) || (got - want).abs() <= tolerance
}

/// Heads of a vector, of vectors for a half, a part or several rounds of a warp's lanes, and of single elements.
const DIMS: [usize; 9] = [8, 64, 80, 128, 256, 512, 808, 5, 300];

fn many_states_merge_as_in_the_oracle<B: Backend + Clone + Sync>(backends: &[B]) {
    let shapes = [[5, 1, 3, 17], [5, 2, 3, 64], [4, 7, 2, 33], [3, 64, 1, 128], [0, 3, 2, 8], [2, 3, 0, 8]];
    let of_dims = [1, 2, 4, 7, 9].into_iter().flat_map(|states| DIMS.map(|dim| [2, states, 3, dim]));
    for (number, shape) in shapes.into_iter().chain(of_dims).enumerate() {
        for (dtype, cpu) in DTYPES.iter().flat_map(|&dtype| backends.iter().map(move |cpu| (dtype, cpu))) {
            let states = States::random(shape, dtype, number as u64);
            let (o, lse) = states.merge_states(cpu);
            states.check((&o, &lse));
        }
    }
}

fn no_states_give_the_empty_state<B: Backend + Clone + Sync>(backends: &[B]) {
    for cpu in backends {
        let states = States { shape: [2, 0, 3, 5], dtype: Dtype::Bf16, o: Vec::new(), lse: Vec::new() };
        assert_eq!(states.merge_states(cpu), (vec![0.0; 30], vec![EMPTY; 6]));
    }
}

/// Values and LSEs of one of two states of every row and head.
fn one_of_two(states: &States, state: usize) -> (Elements, Elements) {
    let [rows, 2, heads, dim] = states.shape else { panic!("two states each") };
    let all = (0..rows).flat_map(|row| (0..heads).map(move |head| states.at(row, state, head)));
    let o: Vec<f32> = all.clone().flat_map(|at| states.o[at * dim..(at + 1) * dim].to_vec()).collect();
    let lse: Vec<f32> = all.map(|at| states.lse[at]).collect();
    (Elements::new(states.dtype, &o), Elements::new(Dtype::F32, &lse))
}

/// Merges state 1 of every row and head into state 0.
fn merge_two<B: Backend>(backend: &B, states: &States) -> (Vec<f32>, Vec<f32>) {
    let [rows, _, heads, dim] = states.shape;
    let ((mut o, mut lse), (other, other_lse)) = (one_of_two(states, 0), one_of_two(states, 1));
    let (shape, lse_shape) = ([rows, heads, dim], [rows, heads]);
    let (other, other_lse) = (other.view(&shape), other_lse.view(&lse_shape));
    merge_state(backend, o.view_mut(&shape), lse.view_mut(&lse_shape), other, other_lse).expect("they fit");
    (o.to_f32(), lse.to_f32())
}

fn two_states_merge_as_in_the_oracle_and_as_many_do<B: Backend + Clone + Sync>(backends: &[B]) {
    let shapes = || DIMS.map(|dim| [7, 2, 2, dim]).into_iter().chain([[40, 2, 3, 33]]);
    let cases = DTYPES.iter().flat_map(|&dtype| shapes().map(move |shape| (dtype, shape)));
    for ((dtype, shape), cpu) in cases.flat_map(|case| backends.iter().map(move |cpu| (case, cpu))) {
        let states = States::random(shape, dtype, 9);
        let (o, lse) = merge_two(cpu, &states);
        states.check((&o, &lse));
        let (many_o, many_lse) = states.merge_states(cpu);
        assert_eq!(lse, many_lse);
        if dtype == Dtype::F32 {
            assert_eq!(o, many_o);
        }
    }
}

/// States of heads outside rows, and elements outside states.
fn states_may_have_any_strides<B: Backend + Clone + Sync>(backends: &[B]) {
    for (dtype, cpu) in DTYPES.iter().flat_map(|&dtype| backends.iter().map(move |cpu| (dtype, cpu))) {
        for [rows, states, heads, dim] in [[3, 4, 2, 80], [3, 7, 2, 300], [5, 1, 3, 8]] {
            let all = States::random([rows, states, heads, dim], dtype, 14);
            let (expected, expected_lse) = all.merge_states(cpu);
            let count = rows * states * heads;
            // lse `[heads, states, rows]`; o the same with the elements of a state adjacent, or `count` apart
            for [state, element] in [[dim, 1], [1, count]] {
                let strides = [1, rows, states * rows];
                let (mut o, mut lse) = (vec![0.0; count * dim], vec![0.0; count]);
                for at in 0..count {
                    let (row, rest) = (at / (states * heads), at % (states * heads));
                    let to = row * strides[0] + rest / heads * strides[1] + rest % heads * strides[2];
                    lse[to] = all.lse[at];
                    (0..dim).for_each(|d| o[to * state + d * element] = all.o[at * dim + d]);
                }
                let (o, lse) = (Elements::new(dtype, &o), Elements::new(Dtype::F32, &lse));
                let mut out = Elements::filled(dtype, rows * heads * dim, f32::NAN);
                let mut out_lse = Elements::filled(Dtype::F32, rows * heads, f32::NAN);
                let [row, of_state, head] = strides.map(|stride| stride * state);
                let o = o.strided(0, &[rows, states, heads, dim], &[row, of_state, head, element]);
                let lse = lse.strided(0, &[rows, states, heads], &strides);
                let (out_state, out_element) = if element == 1 { (dim, 1) } else { (1, rows * heads) };
                let out_strides = [out_state, rows * out_state, out_element];
                let merged = out.strided_mut(0, &[rows, heads, dim], &out_strides);
                let merged_lse = out_lse.strided_mut(0, &[rows, heads], &[1, rows]);
                merge_states(cpu, o, lse, merged, merged_lse).expect("the tensors fit");
                let (out, out_lse) = (out.to_f32(), out_lse.to_f32());
                for at in 0..rows * heads {
                    let to = at / heads + at % heads * rows;
                    assert_eq!(out_lse[to], expected_lse[at], "{dtype}, {dim}, {element}");
                    let found: Vec<f32> = (0..dim).map(|d| out[to * out_state + d * out_element]).collect();
                    assert_eq!(found, expected[at * dim..][..dim], "{dtype}, {dim}, {element}");
                }
            }
        }
    }
}

/// Flags of every second row of a longer tensor: strided, and different from 1.
fn a_mask_selects_the_rows_that_are_merged<B: Backend + Clone + Sync>(backends: &[B]) {
    let cases = DTYPES.iter().flat_map(|&dtype| [1, 5, 33, 127, 600].map(|dim| (dtype, dim)));
    for ((dtype, dim), cpu) in cases.flat_map(|case| backends.iter().map(move |cpu| (case, cpu))) {
        let states = States::random([13, 2, 3, dim], dtype, 13);
        let ((o, lse), (merged, merged_lse)) = (one_of_two(&states, 0), merge_two(cpu, &states));
        let is_merged = |row: usize| row % 3 != 1;
        let flags: Vec<f32> =
            (0..26).map(|at| if at % 2 == 0 && is_merged(at / 2) { -128.0 } else { 0.0 }).collect();
        let flags = Elements::new(Dtype::I8, &flags);
        let (mut out, mut out_lse) = one_of_two(&states, 0);
        let (other, other_lse) = one_of_two(&states, 1);
        StateMerge {
            o: other.view(&[13, 3, dim]),
            lse: other_lse.view(&[13, 3]),
            out: out.view_mut(&[13, 3, dim]),
            out_lse: out_lse.view_mut(&[13, 3]),
            in_place: true,
            mask: Some(flags.strided(0, &[13], &[2])),
        }
        .run(cpu)
        .expect("the tensors fit");
        let (out, out_lse, o, lse) = (out.to_f32(), out_lse.to_f32(), o.to_f32(), lse.to_f32());
        for row in 0..13 {
            let (values, lses) = (row * 3 * dim..(row + 1) * 3 * dim, row * 3..(row + 1) * 3);
            let (o, lse) = if is_merged(row) { (&merged, &merged_lse) } else { (&o, &lse) };
            assert_eq!(out[values.clone()], o[values], "row {row} of {dim} {dtype}");
            assert_eq!(out_lse[lses.clone()], lse[lses], "row {row} of {dim} {dtype}");
        }
    }
}

fn the_empty_state_is_the_identity_bit_for_bit<B: Backend + Clone + Sync>(backends: &[B]) {
    for (dtype, cpu) in DTYPES.iter().flat_map(|&dtype| backends.iter().map(move |cpu| (dtype, cpu))) {
        for (empty, kept) in [(0, 1), (1, 0)] {
            let mut states = States::random([30, 2, 1, 16], dtype, 10);
            for row in 0..30 {
                let at = states.at(row, empty, 0);
                states.lse[at] = EMPTY;
                states.o[at * 16..(at + 1) * 16].fill(0.0);
            }
            let kept: Vec<_> = (0..30).map(|row| states.state(row, kept, 0)).collect();
            let (o, lse): (Vec<_>, Vec<_>) = kept.into_iter().unzip();
            for (got_o, got_lse) in [merge_two(cpu, &states), states.merge_states(cpu)] {
                assert_eq!(got_lse.iter().map(|v| f64::from(*v)).collect::<Vec<_>>(), lse);
                assert_eq!(got_o.iter().map(|v| f64::from(*v)).collect::<Vec<_>>(), o.concat());
            }
        }
    }
}

fn nan_stays_in_its_row_and_head_and_is_never_lost<B: Backend + Clone + Sync>(backends: &[B]) {
    for cpu in backends {
        for broken in [0, 1] {
            for other in [EMPTY, -3.0, 1e30] {
                let mut states = States::random([3, 2, 2, 4], Dtype::F32, 11);
                let (nan, beside) = (states.at(1, broken, 1), states.at(1, 1 - broken, 1));
                (states.lse[nan], states.lse[beside]) = (f32::NAN, other);
                for (o, lse) in [merge_two(cpu, &states), states.merge_states(cpu)] {
                    states.check((&o, &lse));
                    assert!(
                        lse[3].is_nan() && o[12..16].iter().all(|o| o.is_nan()),
                        "{broken}, {other}: {lse:?}"
                    );
                }
            }
        }
    }
}

fn weights_are_powers_of_two_of_the_stored_lse<B: Backend + Clone + Sync>(backends: &[B]) {
    // 2^1 : 2^0 = 2 : 1, and log2 (2 + 1)
    let states = States { shape: [1, 2, 1, 1], dtype: Dtype::F32, o: vec![3.0, 0.0], lse: vec![1.0, 0.0] };
    for cpu in backends {
        for (o, lse) in [merge_two(cpu, &states), states.merge_states(cpu)] {
            assert!((o[0] - 2.0).abs() < 1e-6 && (lse[0] - 3_f32.log2()).abs() < 1e-6, "{o:?} {lse:?}");
            assert!((lse[0] * LSE_TO_NATURAL - (1.0_f32.mul_add(2.0, 1.0)).ln()).abs() < 1e-6, "natural log");
        }
    }
}

/// The spacing of f32 at 1e5 is 0.008, more than the weight of one state among a thousand.
fn many_equal_states_with_a_large_lse_have_equal_weights<B: Backend + Clone + Sync>(backends: &[B]) {
    for cpu in backends {
        let mut states = States::random([2, 1000, 2, 8], Dtype::F32, 12);
        states.lse.fill(1e5);
        let (o, lse) = states.merge_states(cpu);
        states.check((&o, &lse));
        let truth = 1e5 + 1000_f64.log2();
        assert!(lse.iter().all(|&lse| (f64::from(lse) - truth).abs() < 0.008), "{lse:?} instead of {truth}");
    }
}

crate::judge_backends!(
    many_equal_states_with_a_large_lse_have_equal_weights,
    many_states_merge_as_in_the_oracle,
    no_states_give_the_empty_state,
    two_states_merge_as_in_the_oracle_and_as_many_do,
    states_may_have_any_strides,
    a_mask_selects_the_rows_that_are_merged,
    the_empty_state_is_the_identity_bit_for_bit,
    nan_stays_in_its_row_and_head_and_is_never_lost,
    weights_are_powers_of_two_of_the_stored_lse
);
