//! Gated activations against the oracle: dtypes, shapes, strides, tails, error texts.

use crate::arrays::{Array, DTYPES, F32_UNIT, Layout};
use tilewright::{
    Backend, Cpu, Dtype, View,
    activation::{Activation, act_and_mul, gelu_and_mul, gelu_tanh_and_mul, silu_and_mul},
    reference,
};

const ALL: [Activation; 3] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh];

/// Expected values with the absolute error of f32 arithmetic: a few roundings, plus the exponent's error times the
/// exponent. Results below the smallest normal f32 may flush to 0.
fn expected(activation: Activation, x: &[f64], d: usize) -> Vec<(f64, f64)> {
    let rows = x.chunks(2 * d).flat_map(|row| row[..d].iter().zip(&row[d..]));
    rows.map(|(&gate, &factor)| {
        let value = reference::activation::act_and_mul(activation, gate, factor);
        let exponent = match activation {
            Activation::Silu => 0.0,
            Activation::Gelu => gate * gate,
            Activation::GeluTanh => (gate + 0.044715 * gate.powi(3)).abs(),
        };
        let tiny = f64::from(f32::MIN_POSITIVE) * (1.0 + factor.abs());
        (value, value.abs() * (10.0 + 10.0 * exponent) * F32_UNIT + tiny)
    })
    .collect()
}

fn check<B: Backend>(activation: Activation, x: &Array, layout: Layout, backend: &B) {
    let (rows, d) = (x.shape[0], x.shape[1] / 2);
    let dtype = x.view().dtype();
    let (values, slack): (Vec<_>, Vec<_>) = expected(activation, &x.values(), d).into_iter().unzip();
    let others = [Dtype::Bf16, Dtype::F16].into_iter().filter(|_| dtype == Dtype::F32);
    for to in others.chain([dtype]) {
        let mut out = Array::zeros(to, &[rows, d], layout);
        act_and_mul(backend, activation, x.view(), out.view_mut()).unwrap();
        let what = format!("{activation:?} {dtype} to {to} {:?} {layout:?}", x.shape);
        out.assert_close(&values, |i| slack[i], &what);
    }
}

fn activations_match_the_oracle<B: Backend>([backend]: &[B; 1]) {
    for activation in ALL {
        for dtype in DTYPES {
            for (rows, d) in
                [(1, 1), (3, 5), (2, 64), (17, 1001), (0, 4), (3, 8), (1, 96), (2, 1024), (3, 2056)]
            {
                for layout in [Layout::Dense, Layout::Padded, Layout::Aligned] {
                    check(activation, &Array::random(dtype, &[rows, 2 * d], layout, 1), layout, backend);
                }
            }
        }
    }
}

/// Results keep their full relative accuracy where `1 + erf` and `1 + tanh` cancel.
fn tails_keep_their_relative_accuracy<B: Backend>([backend]: &[B; 1]) {
    let gates =
        [-100.0, -30.0, -12.0, -9.0, -6.0, -4.5, -3.0, -1e-3, -1e-20, 0.0, 1e-20, 0.5, 3.0, 9.0, 100.0];
    let factors = [2.5; 15];
    for activation in ALL {
        for dtype in DTYPES {
            let x = Array::new(dtype, &[1, 30], Layout::Dense, &[gates, factors].concat());
            check(activation, &x, Layout::Dense, backend);
        }
    }
}

fn nan_and_infinity_follow_the_formulas<B: Backend>([backend]: &[B; 1]) {
    for activation in ALL {
        let gates = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, -1e30, 1e30, 0.0, -0.0];
        let factors = [1.0, 2.0, 1.0, f32::NAN, 1.0, 1.0, 1.0, 1.0];
        let x = Array::new(Dtype::F32, &[1, 16], Layout::Dense, &[gates, factors].concat());
        let mut out = Array::zeros(Dtype::F32, &[1, 8], Layout::Dense);
        act_and_mul(backend, activation, x.view(), out.view_mut()).unwrap();
        let out = out.values();
        assert!(out[0].is_nan() && out[2].is_nan() && out[3].is_nan(), "{activation:?} {out:?}");
        assert_eq!(out[1], f64::INFINITY);
        assert_eq!(out[4..], [0.0, f64::from(1e30_f32), 0.0, 0.0], "{activation:?}");
    }
}

#[test]
fn rows_are_batch_and_thread_invariant() {
    for activation in ALL {
        let x = Array::random(Dtype::F16, &[9, 4000], Layout::Dense, 2);
        let run = |threads: usize, x: &Array| {
            let mut out = Array::zeros(Dtype::F16, &[x.shape[0], 2000], Layout::Dense);
            act_and_mul(&Cpu::with_threads(threads).unwrap(), activation, x.view(), out.view_mut()).unwrap();
            out.bits()
        };
        let batch = run(4, &x);
        assert_eq!(batch, run(1, &x));
        let row: Vec<f32> = x.values()[5 * 4000..][..4000].iter().map(|&v| v as f32).collect();
        let alone = run(4, &Array::new(Dtype::F16, &[1, 4000], Layout::Dense, &row));
        assert_eq!(alone, batch[5 * 2000..][..2000]);
    }
}

crate::judge_backends!(
    activations_match_the_oracle,
    tails_keep_their_relative_accuracy,
    nan_and_infinity_follow_the_formulas
);

#[test]
fn refusals_name_what_is_wrong() {
    let cpu = Cpu::with_threads(1).unwrap();
    let refuse = |x: &[usize], out: &[usize]| {
        let x = Array::zeros(Dtype::F32, x, Layout::Dense);
        let mut out = Array::zeros(Dtype::F32, out, Layout::Dense);
        silu_and_mul(&cpu, x.view(), out.view_mut()).unwrap_err().to_string()
    };
    assert_eq!(refuse(&[4], &[2, 2]), "activation.silu_and_mul: x has shape [4], expected [rows, 2*d]");
    assert_eq!(refuse(&[2, 5], &[2, 2]), "activation.silu_and_mul: x has shape [2, 5], expected an even 2*d");
    assert_eq!(
        refuse(&[2, 4], &[2, 4]),
        "activation.silu_and_mul: out has shape [2, 4], expected [rows, d] = [2, 2]"
    );

    let data = [0f32; 8];
    let columns = View::strided(&data[..], &[2, 4], &[1, 2]).unwrap();
    let mut out = Array::zeros(Dtype::F32, &[2, 2], Layout::Dense);
    let text = gelu_and_mul(&cpu, columns, out.view_mut()).unwrap_err().to_string();
    assert_eq!(text, "activation.gelu_and_mul: x has stride 2 along its last axis, expected 1");
    let text = gelu_tanh_and_mul(&cpu, columns, out.view_mut()).unwrap_err().to_string();
    assert_eq!(text, "activation.gelu_tanh_and_mul: x has stride 2 along its last axis, expected 1");
}
