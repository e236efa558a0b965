//! Test tensors of any dtype and layout, read back as f64, with the rounding bound of a comparison.
//!
//! Memory outside the view is NaN, so that reads of it spoil the result and writes to it are detected.
#![allow(dead_code, reason = "several test binaries include this file and use parts of it")]

use crate::elements::Elements;
use tilewright::{Dtype, View, ViewMut, reference::quantization::quantize};

pub(crate) const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// The unit roundoff of f32, in which the operators compute.
pub(crate) const F32_UNIT: f64 = 1.0 / (1u64 << 24) as f64;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Layout {
    /// Row-major without gaps.
    Dense,
    /// Row-major with 3 unused elements after each row.
    Padded,
    /// Row-major with 8 unused elements after each row, so that rows remain aligned to vectors.
    Aligned,
    /// The first two of three axes swapped in memory, with a gap after each row.
    HeadsFirst,
}

#[derive(Debug, Clone)]
pub(crate) struct Array {
    data: Elements,
    pub(crate) shape: Vec<usize>,
    strides: Vec<usize>,
}

impl Array {
    /// Values in logical row-major order, rounded to `dtype`.
    pub(crate) fn new(dtype: Dtype, shape: &[usize], layout: Layout, values: &[f32]) -> Self {
        let strides = strides(shape, layout);
        let len = 1 + shape.iter().zip(&strides).map(|(n, s)| n.saturating_sub(1) * s).sum::<usize>() + 3;
        let dense = layout == Layout::Dense;
        let mut wide = vec![f32::NAN; if dense { values.len() } else { len }];
        for (i, &value) in values.iter().enumerate() {
            wide[offset(i, shape, &strides)] = value;
        }
        let data = Elements::new(dtype, &wide);
        Self { data, shape: shape.to_vec(), strides }
    }

    pub(crate) fn random(dtype: Dtype, shape: &[usize], layout: Layout, seed: u64) -> Self {
        Self::new(dtype, shape, layout, &random(shape.iter().product(), seed))
    }

    pub(crate) fn zeros(dtype: Dtype, shape: &[usize], layout: Layout) -> Self {
        Self::new(dtype, shape, layout, &vec![0.0; shape.iter().product()])
    }

    pub(crate) fn view(&self) -> View<'_> {
        self.data.strided(0, &self.shape, &self.strides)
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_> {
        self.data.strided_mut(0, &self.shape, &self.strides)
    }

    /// All values in logical row-major order.
    pub(crate) fn values(&self) -> Vec<f64> {
        let memory = self.data.to_f32();
        let count = self.shape.iter().product();
        (0..count).map(|i| f64::from(memory[offset(i, &self.shape, &self.strides)])).collect()
    }

    /// Bits of all values in logical row-major order.
    pub(crate) fn bits(&self) -> Vec<u64> {
        self.values().into_iter().map(f64::to_bits).collect()
    }

    /// Whether the gaps between rows are still NaN.
    pub(crate) fn gaps_untouched(&self) -> bool {
        let mut memory = self.data.to_f32();
        let count: usize = self.shape.iter().product();
        (0..count).for_each(|i| memory[offset(i, &self.shape, &self.strides)] = f32::NAN);
        memory.iter().all(|value| value.is_nan())
    }

    /// Fails unless each value is within the dtype's rounding of the expected one plus `slack(i)`, the error of the f32
    /// arithmetic before that rounding.
    pub(crate) fn assert_close(&self, expected: &[f64], slack: impl Fn(usize) -> f64, what: &str) {
        let (unit, smallest) = match self.data {
            Elements::F32(_) => (F32_UNIT, 2f64.powi(-150)),
            Elements::F16(_) => (2f64.powi(-11), 2f64.powi(-25)),
            Elements::Bf16(_) => (2f64.powi(-8), 2f64.powi(-134)),
            _ => panic!("8-bit results are compared by assert_quantized"),
        };
        let actual = self.values();
        assert_eq!(actual.len(), expected.len(), "{what}");
        for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
            let allowed = unit * (e.abs() + slack(i)) + smallest + slack(i);
            let same = a == e || a.is_nan() && e.is_nan();
            assert!(
                same || (a - e).abs() <= allowed,
                "{what}: element {i} is {a}, expected {e} ± {allowed:e}"
            );
        }
        assert!(self.gaps_untouched(), "{what}: wrote between the rows");
    }

    /// Fails unless each value is the nearest 8-bit value, saturated, of a number within `slack(i)` of the expected one.
    pub(crate) fn assert_quantized(&self, expected: &[f64], slack: impl Fn(usize) -> f64, what: &str) {
        let dtype = self.view().dtype();
        let actual = self.values();
        assert_eq!(actual.len(), expected.len(), "{what}");
        for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
            let [low, high] = [e - slack(i), e + slack(i)].map(|bound| quantize(dtype, bound));
            assert!(
                (low..=high).contains(a) || a.is_nan() && e.is_nan(),
                "{what}: element {i} is {a}, expected {low} to {high}"
            );
        }
        // int8 has no NaN to fill gaps with
        assert!(dtype == Dtype::I8 || self.gaps_untouched(), "{what}: wrote between the rows");
    }
}

/// Bell-shaped values between -6 and 6 with deviation about 1.7.
pub(crate) fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678_9ABC_DEF1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| 3.0 * (next() + next() + next() + next())).collect()
}

fn strides(shape: &[usize], layout: Layout) -> Vec<usize> {
    let width = shape[shape.len() - 1];
    let row = width
        + match layout {
            Layout::Dense => 0,
            Layout::Padded | Layout::HeadsFirst => 3,
            Layout::Aligned => 8,
        };
    match (shape, layout) {
        ([_], _) => vec![1],
        ([_, _], _) => vec![row, 1],
        ([tokens, _, _], Layout::HeadsFirst) => vec![row, row * tokens, 1],
        ([_, heads, _], _) => vec![row * (*heads).max(1), row, 1],
        (_, Layout::Dense) => (1..=shape.len()).map(|axis| shape[axis..].iter().product()).collect(),
        _ => panic!("tensors of other layouts have one to three axes"),
    }
}

fn offset(index: usize, shape: &[usize], strides: &[usize]) -> usize {
    let axes = shape.iter().zip(strides).rev();
    axes.fold((index, 0), |(rest, at), (n, stride)| (rest / n, at + rest % n * stride)).1
}
