//! Quantization with a scale per group against the oracle, and bit for bit against the CPU.

use crate::arrays::{Array, DTYPES, F32_UNIT, Layout, random};
use tilewright::{
    Backend, Cpu, Dtype, Operator, ViewMut,
    quantization::{GroupQuantization, quantize_groups},
    reference::quantization::group_scale,
};

/// Rows of x and of the result, width, group size.
const SHAPES: [(usize, usize, usize, usize); 8] = [
    (1, 1, 16, 16),
    (3, 4, 256, 128),
    (5, 5, 192, 64),
    (2, 8, 512, 256),
    (4, 4, 96, 32),
    (33, 36, 384, 128),
    (0, 4, 128, 128),
    (0, 0, 128, 128),
];
const EPS: f32 = 1e-10;

/// A quantization into arrays of its own.
struct Quantized {
    out: Array,
    /// f32 `[out_rows, groups]`, in columns of `out_rows + 3` elements if `in_columns`.
    scales: Vec<f32>,
    strides: [usize; 2],
    groups: usize,
}

impl Quantized {
    fn new<B: Backend>(backend: &B, x: &Array, shape: (usize, usize), params: QuantizationParams) -> Self {
        let QuantizationParams { to, group_size, power_of_two, layout } = params;
        let ((out_rows, width), groups) = (shape, shape.1 / group_size);
        let (strides, len) = match layout {
            Layout::Dense => ([groups, 1], out_rows * groups),
            _ => ([1, out_rows + 3], groups * (out_rows + 3)),
        };
        let mut out = Array::new(to, &[out_rows, width], layout, &vec![7.0; out_rows * width]);
        let mut scales = vec![-1.0; len];
        let view = ViewMut::strided(scales.as_mut_slice(), &[out_rows, groups], &strides).unwrap();
        let (x, out_view) = (x.view(), out.view_mut());
        GroupQuantization { x, group_size, eps: EPS, power_of_two, out: out_view, scales: view }
            .run(backend)
            .unwrap();
        Self { out, scales, strides, groups }
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales[row * self.strides[0] + group * self.strides[1]]
    }

    /// Bits of all scales and elements, with one pattern for NaN.
    fn bits(&self) -> Vec<u64> {
        let scales = self.scales.iter().map(|scale| f64::from(*scale));
        let all = scales.chain(self.out.values());
        all.map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
    }
}

#[derive(Clone, Copy, Debug)]
struct QuantizationParams {
    to: Dtype,
    group_size: usize,
    power_of_two: bool,
    layout: Layout,
}

/// All combinations of results and layouts for a group size.
fn all_params(group_size: usize) -> impl Iterator<Item = QuantizationParams> {
    let dtypes = [Dtype::E4m3, Dtype::E5m2].into_iter();
    let layouts = [(Layout::Dense, false), (Layout::Padded, false), (Layout::Padded, true)];
    dtypes.flat_map(move |to| {
        layouts.map(|(layout, power_of_two)| QuantizationParams { to, group_size, power_of_two, layout })
    })
}

fn groups_match_the_oracle<B: Backend>([backend]: &[B; 1]) {
    for from in DTYPES {
        for (rows, out_rows, width, group_size) in SHAPES {
            for params in all_params(group_size) {
                let x = Array::random(from, &[rows, width], params.layout, 9);
                let found = Quantized::new(backend, &x, (out_rows, width), params);
                let what = format!("{from} [{rows}, {width}] {params:?}");
                assert_quantized(&found, &x, params, &what);
            }
        }
    }
}

/// Fails unless scales are the definition's within a rounding, and elements are the quotients.
fn assert_quantized(found: &Quantized, x: &Array, params: QuantizationParams, what: &str) {
    let QuantizationParams { to, group_size, power_of_two, .. } = params;
    let mut values = x.values();
    values.resize(found.out.shape.iter().product(), 0.0);
    let mut quotients = Vec::new();
    for (i, group) in values.chunks(group_size).enumerate() {
        let (row, column) = (i / found.groups, i % found.groups);
        let scale = f64::from(found.scale(row, column));
        let expected = group_scale(group, f64::from(EPS), f64::from(to.max()), power_of_two);
        let slack = if power_of_two { 0.0 } else { F32_UNIT * expected };
        assert!(
            (scale - expected).abs() <= slack,
            "{what}: scale {row}, {column} is {scale}, not {expected}"
        );
        quotients.extend(group.iter().map(|x| x / scale));
    }
    found.out.assert_quantized(&quotients, |i| 2.0 * F32_UNIT * quotients[i].abs(), what);
    if params.layout != Layout::Dense {
        let gaps =
            (0..found.groups).flat_map(|group| &found.scales[(group + 1) * found.strides[1] - 3..][..3]);
        assert!(gaps.into_iter().all(|gap| *gap == -1.0), "{what}: wrote between the columns of scales");
    }
}

fn bits_are_those_of_the_cpu<B: Backend>([backend]: &[B; 1]) {
    let cpu = Cpu::with_threads(1).unwrap();
    let mut values = random(4 * 256, 11);
    let mut scale = 1e-12;
    for group in values.chunks_mut(32) {
        group.iter_mut().for_each(|x| *x *= scale);
        scale *= 5.0;
    }
    for (at, special) in
        [(1, f32::NAN), (40, f32::INFINITY), (70, -0.0), (300, f32::NEG_INFINITY), (301, 1e38)]
    {
        values[at] = special;
    }
    values[512..768].fill(0.0);
    for from in DTYPES {
        for params in [16, 32, 64, 128, 256].into_iter().flat_map(all_params) {
            let x = Array::new(from, &[4, 256], params.layout, &values);
            let [found, expected] =
                [Quantized::new(backend, &x, (6, 256), params), Quantized::new(&cpu, &x, (6, 256), params)];
            assert_eq!(found.bits(), expected.bits(), "{from} {params:?}");
        }
    }
}

fn special_groups_follow_the_formulas<B: Backend>([backend]: &[B; 1]) {
    let mut values = vec![0.0; 64];
    values[0] = f32::NAN;
    (values[16], values[17]) = (f32::INFINITY, 3.0);
    (values[32], values[33]) = (-448.0, 17.0); // halfway between 16 and 18: to even
    let x = Array::new(Dtype::F32, &[1, 64], Layout::Dense, &values);
    for power_of_two in [false, true] {
        let layout = Layout::Dense;
        let params = QuantizationParams { to: Dtype::E4m3, group_size: 16, power_of_two, layout };
        let found = Quantized::new(backend, &x, (1, 64), params);
        let out = found.out.values();
        assert!(found.scale(0, 0).is_nan() && out[..16].iter().all(|x| x.is_nan()), "{out:?}");
        assert!(found.scale(0, 1) == f32::INFINITY && out[16].is_nan() && out[17] == 0.0, "{out:?}");
        assert_eq!((found.scale(0, 2), out[32], out[33]), (1.0, -448.0, 16.0));
        let zeros = if power_of_two { 2f32.powi(-42) } else { EPS / 448.0 };
        assert_eq!((found.scale(0, 3), out[48]), (zeros, 0.0));
    }
}

crate::judge_backends!(
    groups_match_the_oracle,
    bits_are_those_of_the_cpu,
    special_groups_follow_the_formulas
);

#[test]
fn refusals_name_what_is_wrong() {
    let cpu = Cpu::with_threads(1).unwrap();
    let error = |x: (Dtype, &[usize]), group_size, out: (Dtype, &[usize]), scales: &[usize]| {
        let x = Array::zeros(x.0, x.1, Layout::Dense);
        let mut out = Array::zeros(out.0, out.1, Layout::Dense);
        let mut scales = Array::zeros(Dtype::F32, scales, Layout::Dense);
        let why = quantize_groups(&cpu, x.view(), group_size, out.view_mut(), scales.view_mut());
        why.unwrap_err().to_string().replace("quantization.quantize_groups: ", "")
    };
    let (f32, e4m3) = (Dtype::F32, Dtype::E4m3);
    assert_eq!(error((f32, &[4]), 16, (e4m3, &[4]), &[1]), "x has shape [4], expected [rows, width]");
    assert_eq!(
        error((e4m3, &[2, 16]), 16, (e4m3, &[2, 16]), &[2, 1]),
        "x is e4m3, expected f32, f16 or bf16"
    );
    assert_eq!(
        error((f32, &[2, 16]), 12, (e4m3, &[2, 16]), &[2, 1]),
        "group_size = 12, expected one of [16, 32, 64, 128, 256]"
    );
    assert_eq!(
        error((f32, &[2, 48]), 32, (e4m3, &[2, 48]), &[2, 1]),
        "x has shape [2, 48], expected rows of groups of 32"
    );
    assert_eq!(
        error((f32, &[2, 16]), 16, (e4m3, &[1, 16]), &[1, 1]),
        "out has shape [1, 16], expected [rows or more, width] = [2, 16]"
    );
    assert_eq!(error((f32, &[2, 16]), 16, (f32, &[2, 16]), &[2, 1]), "out is f32, expected e4m3 or e5m2");
    assert_eq!(
        error((f32, &[2, 32]), 16, (e4m3, &[3, 32]), &[2, 2]),
        "scales has shape [2, 2], expected [rows of out, groups] = [3, 2]"
    );
    let (x, mut out) =
        (Array::zeros(f32, &[1, 16], Layout::Dense), Array::zeros(e4m3, &[1, 16], Layout::Dense));
    let mut scales = Array::zeros(Dtype::F32, &[1, 1], Layout::Dense);
    let operator = GroupQuantization {
        x: x.view(),
        group_size: 16,
        eps: 0.0,
        power_of_two: false,
        out: out.view_mut(),
        scales: scales.view_mut(),
    };
    let why = operator.run(&cpu).unwrap_err().to_string();
    assert_eq!(why, "quantization.quantize_groups: eps = 0, expected a normal number above 0");
}
