//! RMSNorm and layer norm against the oracle: dtypes, shapes, strides, the fused addition, 8-bit results, edge cases, error texts.

use crate::arrays::{Array, DTYPES, F32_UNIT, Layout};
use tilewright::{
    Backend, Cpu, Dtype, Operator, View,
    norm::{LayerNorm, NormWeight, RmsNorm, fused_add_rmsnorm, rmsnorm, rmsnorm_in_place},
    reference,
};

/// Far above the 1e-6 of published models, so that its position in the formula is observable.
const EPS: f32 = 0.125;

/// Shapes with widths around the number of lanes; one is per-head.
const SHAPES: [&[usize]; 17] = [
    &[1, 1],
    &[3, 5],
    &[2, 16],
    &[4, 129],
    &[33, 1000],
    &[5, 3, 64],
    &[1, 2, 7],
    &[5, 8],
    &[3, 24],
    &[3, 128],
    &[2, 256],
    &[2, 1024],
    &[2, 1032],
    &[1, 1280],
    &[2, 4096],
    &[1, 5120],
    &[1, 33_000], // longer than the registers of a CTA
];

fn expected(x: &[f64], weight: &[f64], offset: f64) -> Vec<f64> {
    let rows = x.chunks(weight.len());
    rows.flat_map(|row| reference::norm::rmsnorm(row, weight, offset, f64::from(EPS))).collect()
}

/// Error of a sum of squares in 16 lanes and a few operations, each with one f32 rounding.
fn slack(expected: &[f64], width: usize) -> impl Fn(usize) -> f64 {
    move |i| expected[i].abs() * (width as f64 / 16.0 + 24.0) * F32_UNIT
}

fn layouts(shape: &[usize]) -> &'static [Layout] {
    match shape {
        [_, _, _] => &[Layout::Dense, Layout::Padded, Layout::HeadsFirst],
        [_, 33_000] => &[Layout::Dense],
        _ => &[Layout::Dense, Layout::Padded, Layout::Aligned],
    }
}

fn with_offset(weight: &Array, offset: f64) -> NormWeight<'_> {
    if offset == 0.0 { NormWeight::new(weight.view()) } else { NormWeight::gemma(weight.view()) }
}

fn each_case(test: impl Fn(Dtype, &[usize], Layout)) {
    for dtype in DTYPES {
        for shape in SHAPES {
            layouts(shape).iter().for_each(|&layout| test(dtype, shape, layout));
        }
    }
}

fn rmsnorm_matches_the_oracle<B: Backend>([backend]: &[B; 1]) {
    each_case(|dtype, shape, layout| {
        let width = shape[shape.len() - 1];
        let x = Array::random(dtype, shape, layout, 1);
        let weight = Array::random(dtype, &[width], Layout::Dense, 2);
        for offset in [0.0, 1.0] {
            let typed = with_offset(&weight, offset);
            let what = format!("{dtype} {shape:?} {layout:?} offset {offset}");
            let expected = expected(&x.values(), &weight.values(), offset);
            let mut out = Array::zeros(dtype, shape, layout);
            rmsnorm(backend, x.view(), typed, EPS, out.view_mut()).unwrap();
            out.assert_close(&expected, slack(&expected, width), &what);

            let mut in_place = x.clone();
            rmsnorm_in_place(backend, in_place.view_mut(), typed, EPS).unwrap();
            assert_eq!(in_place.bits(), out.bits(), "{what}: in place differs");
        }
    });
}

fn fused_add_keeps_the_sum_in_f32_and_stores_it_rounded<B: Backend>([backend]: &[B; 1]) {
    each_case(|dtype, shape, layout| {
        let width = shape[shape.len() - 1];
        for offset in [0.0, 1.0] {
            let mut x = Array::random(dtype, shape, layout, 3);
            let mut residual = Array::random(dtype, shape, Layout::Padded, 4);
            let weight = Array::random(Dtype::F32, &[width], Layout::Dense, 5);
            let sum: Vec<f64> = x.values().iter().zip(residual.values()).map(|(x, r)| x + r).collect();
            let expected = expected(&sum, &weight.values(), offset);
            let typed = with_offset(&weight, offset);
            fused_add_rmsnorm(backend, x.view_mut(), residual.view_mut(), typed, EPS).unwrap();
            let what = format!("{dtype} {shape:?} {layout:?} offset {offset}");
            x.assert_close(&expected, slack(&expected, width), &what);
            residual.assert_close(&sum, |i| sum[i].abs() * F32_UNIT, &format!("{what}: residual"));
        }
    });
}

/// The norm of `x + residual`, out of place.
fn add_rmsnorm<'a>(
    x: &'a Array,
    residual: &'a mut Array,
    weight: &'a Array,
    out: &'a mut Array,
) -> RmsNorm<'a> {
    let residual = Some(residual.view_mut());
    RmsNorm {
        x: Some(x.view()),
        residual,
        weight: weight.view().into(),
        eps: EPS,
        scale: None,
        out: out.view_mut(),
    }
}

fn add_keeps_the_sum_in_f32_and_rounds_the_result<B: Backend>([backend]: &[B; 1]) {
    each_case(|dtype, shape, layout| {
        let width = shape[shape.len() - 1];
        let x = Array::random(dtype, shape, layout, 3);
        let mut residual = Array::random(Dtype::F32, shape, Layout::Padded, 4);
        let weight = Array::random(Dtype::F32, &[width], Layout::Dense, 5);
        let sum: Vec<f64> = x.values().iter().zip(residual.values()).map(|(x, r)| x + r).collect();
        let expected = expected(&sum, &weight.values(), 0.0);
        for out_dtype in DTYPES {
            let (mut out, mut residual) = (Array::zeros(out_dtype, shape, layout), residual.clone());
            add_rmsnorm(&x, &mut residual, &weight, &mut out).run(backend).unwrap();
            let what = format!("{dtype} to {out_dtype} {shape:?} {layout:?}");
            out.assert_close(&expected, slack(&expected, width), &what);
            residual.assert_close(&sum, |i| sum[i].abs() * F32_UNIT, &format!("{what}: residual"));
        }
        // in f32 both operators give the same bits
        if dtype == Dtype::F32 {
            let (mut out, mut in_place, mut in_place_residual) = (x.clone(), x.clone(), residual.clone());
            let in_place_view = in_place_residual.view_mut();
            fused_add_rmsnorm(backend, in_place.view_mut(), in_place_view, weight.view(), EPS).unwrap();
            add_rmsnorm(&x, &mut residual, &weight, &mut out).run(backend).unwrap();
            assert_eq!(
                (out.bits(), residual.bits()),
                (in_place.bits(), in_place_residual.bits()),
                "{shape:?}"
            );
        }
    });
}

/// Error of a mean in 16 lanes, which is absolute in the deviations, then as [`slack`] and a sum with the bias.
fn layer_slack(factors: &[f64], width: usize) -> impl Fn(usize) -> f64 {
    let unit = (width as f64 / 16.0 + 24.0) * F32_UNIT;
    move |i| 20.0 * (1.0 + factors[i % width].abs()) * unit
}

fn layer_norm_matches_the_oracle<B: Backend>([backend]: &[B; 1]) {
    each_case(|dtype, shape, layout| {
        let width = shape[shape.len() - 1];
        let x: Vec<f32> =
            Array::random(dtype, shape, layout, 1).values().iter().map(|x| *x as f32 + 3.0).collect();
        let x = Array::new(dtype, shape, layout, &x);
        let [weight, bias] = [2, 3].map(|seed| Array::random(Dtype::F32, &[width], Layout::Dense, seed));
        for (out_dtype, offset) in DTYPES.iter().flat_map(|&of| [0.0, 1.0].map(|offset| (of, offset))) {
            let typed = with_offset(&weight, offset);
            let (factors, biases) = (weight.values(), bias.values());
            let rows = x.values();
            let rows = rows
                .chunks(width)
                .flat_map(|row| reference::norm::layer_norm(row, &factors, offset, &biases, f64::from(EPS)));
            let expected: Vec<f64> = rows.collect();
            let mut out = Array::zeros(out_dtype, shape, layout);
            let (x, bias, out_view) = (x.view(), bias.view(), out.view_mut());
            LayerNorm { x, weight: typed, bias, eps: EPS, scale: None, out: out_view }.run(backend).unwrap();
            let what = format!("{dtype} to {out_dtype} {shape:?} {layout:?} offset {offset}");
            out.assert_close(&expected, layer_slack(&factors, width), &what);
        }
    });
}

/// A scale that saturates values in e4m3 and int8, and one that makes some of them subnormal.
const SCALES: [f32; 2] = [0.003, 40.0];

fn norms_are_quantized_once<B: Backend>([backend]: &[B; 1]) {
    // the oracle of 8-bit rounding searches all values
    let small = || SHAPES.into_iter().filter(|shape| shape.iter().product::<usize>() < 1000);
    for dtype in DTYPES {
        for (shape, to) in
            small().flat_map(|shape| [Dtype::E4m3, Dtype::E5m2, Dtype::I8].map(|to| (shape, to)))
        {
            for (layout, scale) in
                layouts(shape).iter().flat_map(|&layout| SCALES.map(|scale| (layout, scale)))
            {
                check_quantized(backend, (dtype, to), (shape, layout), scale);
            }
        }
    }
}

fn check_quantized<B: Backend>(
    backend: &B,
    (dtype, to): (Dtype, Dtype),
    (shape, layout): (&[usize], Layout),
    scale: f32,
) {
    let width = shape[shape.len() - 1];
    let what = format!("{dtype} to {to} {shape:?} {layout:?} / {scale}");
    let (x, residual) = (Array::random(dtype, shape, layout, 1), Array::random(dtype, shape, layout, 4));
    let [weight, bias] = [2, 3].map(|seed| Array::random(Dtype::F32, &[width], Layout::Dense, seed));
    let divisor = Array::new(Dtype::F32, &[1], Layout::Dense, &[scale]);
    let divided = |values: &[f64]| values.iter().map(|y| y / f64::from(scale)).collect::<Vec<f64>>();
    let mut out = Array::zeros(to, shape, layout);
    // the residual has the dtype of x
    let sum: Vec<f64> = x.values().iter().zip(residual.values()).map(|(x, r)| x + r).collect();
    let mut kept = residual.clone();
    for (input, residual) in [(x.values(), None), (sum.clone(), Some(kept.view_mut()))] {
        let added = residual.is_some();
        let norm = divided(&expected(&input, &weight.values(), 0.0));
        let (weight, scale, out_view) = (weight.view().into(), Some(divisor.view()), out.view_mut());
        RmsNorm { x: Some(x.view()), residual, weight, eps: EPS, scale, out: out_view }.run(backend).unwrap();
        out.assert_quantized(&norm, slack(&norm, width), &format!("{what}, added {added}"));
    }
    kept.assert_close(&sum, |i| sum[i].abs() * F32_UNIT, &format!("{what}: residual"));

    let (factors, biases, rows) = (weight.values(), bias.values(), x.values());
    let rows = rows
        .chunks(width)
        .flat_map(|row| reference::norm::layer_norm(row, &factors, 0.0, &biases, f64::from(EPS)));
    let layer = divided(&rows.collect::<Vec<f64>>());
    let slack = layer_slack(&factors, width);
    let (scale_view, out_view) = (Some(divisor.view()), out.view_mut());
    let weight = weight.view().into();
    LayerNorm { x: x.view(), weight, bias: bias.view(), eps: EPS, scale: scale_view, out: out_view }
        .run(backend)
        .unwrap();
    out.assert_quantized(&layer, |i| slack(i) / f64::from(scale), &format!("{what}: layer norm"));
}

#[test]
fn rows_are_batch_and_thread_invariant() {
    for dtype in DTYPES {
        let (rows, width) = (33, 1000);
        let x = Array::random(dtype, &[rows, width], Layout::Dense, 6);
        let weight = Array::random(dtype, &[width], Layout::Dense, 7);
        let run = |threads: usize, x: &Array| {
            let mut out = Array::zeros(dtype, &x.shape, Layout::Dense);
            rmsnorm(&Cpu::with_threads(threads).unwrap(), x.view(), weight.view(), EPS, out.view_mut())
                .unwrap();
            out.bits()
        };
        let batch = run(4, &x);
        assert_eq!(batch, run(1, &x));
        for (row, values) in x.values().chunks(width).enumerate() {
            let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
            let alone = run(4, &Array::new(dtype, &[1, width], Layout::Dense, &values));
            assert_eq!(alone, batch[row * width..][..width], "{dtype} row {row}");
        }
    }
}

fn nan_stays_in_its_row_and_empty_batches_are_fine<B: Backend>([backend]: &[B; 1]) {
    let x = Array::new(Dtype::F16, &[2, 2], Layout::Dense, &[f32::NAN, 1.0, 3.0, 4.0]);
    let weight = Array::new(Dtype::F16, &[2], Layout::Dense, &[1.0, 1.0]);
    let mut out = Array::zeros(Dtype::F16, &[2, 2], Layout::Dense);
    rmsnorm(backend, x.view(), weight.view(), EPS, out.view_mut()).unwrap();
    let values = out.values();
    assert!(values[0].is_nan() && values[1].is_nan() && values[2..].iter().all(|v| v.is_finite()));

    for shape in [&[0, 2][..], &[0, 3, 2], &[3, 0, 2]] {
        let empty = Array::zeros(Dtype::F16, shape, Layout::Dense);
        let mut out = empty.clone();
        rmsnorm(backend, empty.view(), weight.view(), EPS, out.view_mut()).unwrap();
    }
}

fn a_zero_row_is_zero<B: Backend>([backend]: &[B; 1]) {
    let mut x = Array::zeros(Dtype::F32, &[1, 4], Layout::Dense);
    let weight = Array::random(Dtype::F32, &[4], Layout::Dense, 1);
    rmsnorm_in_place(backend, x.view_mut(), weight.view(), EPS).unwrap();
    assert_eq!(x.values(), [0.0; 4]);
}

/// The 16-byte loads of a GPU require other alignments than its scalar loads.
fn mixed_dtypes_and_layouts_weight_dtypes_and_rows<B: Backend>([backend]: &[B; 1]) {
    for dtype in DTYPES {
        for (weight_dtype, layout) in
            DTYPES.iter().flat_map(|&of| [Layout::Dense, Layout::Padded].map(|l| (of, l)))
        {
            let x = Array::random(dtype, &[3, 1280], layout, 8);
            let weight = Array::random(weight_dtype, &[1280], Layout::Dense, 9);
            let expected = expected(&x.values(), &weight.values(), 0.0);
            let mut out = Array::zeros(dtype, &[3, 1280], Layout::Dense);
            rmsnorm(backend, x.view(), weight.view(), EPS, out.view_mut()).unwrap();
            out.assert_close(
                &expected,
                slack(&expected, 1280),
                &format!("{dtype}, {weight_dtype} {layout:?}"),
            );
            let mut out = Array::zeros(weight_dtype, &[3, 1280], layout);
            rmsnorm(backend, x.view(), weight.view(), EPS, out.view_mut()).unwrap();
            out.assert_close(
                &expected,
                slack(&expected, 1280),
                &format!("{dtype} to {weight_dtype} {layout:?}"),
            );
        }
    }
}

crate::judge_backends!(
    layer_norm_matches_the_oracle,
    norms_are_quantized_once,
    rmsnorm_matches_the_oracle,
    fused_add_keeps_the_sum_in_f32_and_stores_it_rounded,
    add_keeps_the_sum_in_f32_and_rounds_the_result,
    nan_stays_in_its_row_and_empty_batches_are_fine,
    a_zero_row_is_zero,
    mixed_dtypes_and_layouts_weight_dtypes_and_rows
);

#[test]
fn refusals_name_what_is_wrong() {
    let cpu = Cpu::with_threads(1).unwrap();
    let x = Array::random(Dtype::F32, &[2, 128], Layout::Dense, 1);
    let weight = |n: usize| Array::random(Dtype::F32, &[n], Layout::Dense, 1);
    let refuse = |x: View<'_>, weight: &Array, eps: f32, mut out: Array| {
        rmsnorm(&cpu, x, weight.view(), eps, out.view_mut()).unwrap_err().to_string()
    };
    let out = || Array::zeros(Dtype::F32, &[2, 128], Layout::Dense);
    let text = refuse(x.view(), &weight(64), EPS, out());
    assert_eq!(text, "norm.rmsnorm: weight has shape [64], expected [hidden] = [128]");
    let text = refuse(x.view(), &weight(128), -1.0, out());
    assert_eq!(text, "norm.rmsnorm: eps = -1 is not a finite number >= 0");
    let text = refuse(x.view(), &weight(128), EPS, Array::zeros(Dtype::F32, &[3, 128], Layout::Dense));
    assert_eq!(text, "norm.rmsnorm: out has shape [3, 128], expected [rows, hidden] = [2, 128]");
    let text = refuse(weight(128).view(), &weight(128), EPS, out());
    assert_eq!(text, "norm.rmsnorm: x has shape [128], expected [rows, hidden] or [tokens, heads, head_dim]");

    let data = vec![0f32; 256];
    let columns = View::strided(&data, &[2, 128], &[1, 2]).unwrap();
    let text = refuse(columns, &weight(128), EPS, out());
    assert_eq!(text, "norm.rmsnorm: x has stride 2 along its last axis, expected 1");

    let mut heads = Array::random(Dtype::F32, &[2, 3, 64], Layout::Dense, 1);
    let text = rmsnorm_in_place(&cpu, heads.view_mut(), weight(128).view(), EPS).unwrap_err().to_string();
    assert_eq!(text, "norm.rmsnorm_in_place: weight has shape [128], expected [head_dim] = [64]");
    let (mut x, mut residual) = (out(), Array::zeros(Dtype::F16, &[2, 128], Layout::Dense));
    let refused =
        fused_add_rmsnorm(&cpu, x.view_mut(), residual.view_mut(), weight(128).view(), EPS).unwrap_err();
    assert_eq!(refused.to_string(), "norm.fused_add_rmsnorm: residual is f16, expected f32");
    let of_128 = weight(128);
    let add = |residual: &mut Array, out: &mut Array| {
        add_rmsnorm(&x, residual, &of_128, out).run(&cpu).unwrap_err().to_string()
    };
    let text = add(&mut residual, &mut out());
    assert_eq!(text, "norm.add_rmsnorm: residual is f16, expected f32");
    let mut short = Array::zeros(Dtype::F32, &[1, 128], Layout::Dense);
    let text = add(&mut short, &mut out());
    assert_eq!(text, "norm.add_rmsnorm: residual has shape [1, 128], expected [rows, hidden] = [2, 128]");
    let text = add(&mut out(), &mut short);
    assert_eq!(text, "norm.add_rmsnorm: out has shape [1, 128], expected [rows, hidden] = [2, 128]");
}

#[test]
fn refusals_of_scales_and_layer_norms_name_what_is_wrong() {
    let cpu = Cpu::with_threads(1).unwrap();
    let of = |dtype, shape: &[usize]| Array::zeros(dtype, shape, Layout::Dense);
    let (x, weight) = (of(Dtype::F16, &[2, 8]), of(Dtype::F32, &[8]));
    let scaled = |scale: &Array, mut out: Array| {
        let (scale, out) = (Some(scale.view()), out.view_mut());
        let norm =
            RmsNorm { x: Some(x.view()), residual: None, weight: weight.view().into(), eps: EPS, scale, out };
        norm.run(&cpu).unwrap_err().to_string()
    };
    let text = scaled(&of(Dtype::F32, &[2]), of(Dtype::E4m3, &[2, 8]));
    assert_eq!(text, "norm.rmsnorm: scale has shape [2], expected [1]");
    let text = scaled(&of(Dtype::F16, &[1]), of(Dtype::E4m3, &[2, 8]));
    assert_eq!(text, "norm.rmsnorm: scale is f16, expected f32");
    let text = scaled(&of(Dtype::F32, &[1]), of(Dtype::F16, &[2, 8]));
    assert_eq!(text, "norm.rmsnorm: out is f16, with a scale it must have 8 bits");
    let layer = |bias: &Array, mut out: Array| {
        let (weight, bias, out) = (weight.view().into(), bias.view(), out.view_mut());
        LayerNorm { x: x.view(), weight, bias, eps: EPS, scale: None, out }.run(&cpu).unwrap_err().to_string()
    };
    let text = layer(&of(Dtype::F32, &[7]), of(Dtype::F16, &[2, 8]));
    assert_eq!(text, "norm.layer_norm: bias has shape [7], expected [hidden] = [8]");
    let text = layer(&of(Dtype::E5m2, &[8]), of(Dtype::F16, &[2, 8]));
    assert_eq!(text, "norm.layer_norm: bias is e5m2, expected f32, f16 or bf16");
    let text = layer(&of(Dtype::F32, &[8]), of(Dtype::F16, &[3, 8]));
    assert_eq!(text, "norm.layer_norm: out has shape [3, 8], expected [rows, hidden] = [2, 8]");
    let text = layer(&of(Dtype::F32, &[8]), of(Dtype::E4m3, &[2, 8]));
    assert_eq!(text, "norm.layer_norm: out is e4m3, expected f32, f16 or bf16");
}
