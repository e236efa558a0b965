//! Packed weights: bit equality with `linear`, quantization error, fused products and rejected arguments.

use crate::{Elements, Generator, cpus, round};
use half::bf16;
use tilewright::{
    Backend, Cpu, Dtype, Operator, View, ViewMut,
    activation::{self, Activation},
    cpu::Isa,
    gemm::{
        GROUP, GatedLinear, PackedLinear, PackedMatrix, PackedProduct, PackedWeight, SegmentGemm,
        WeightFormat, linear, pack,
    },
};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const QUANTIZED: [WeightFormat; 2] = [WeightFormat::Int8, WeightFormat::Int4];
/// Inputs and features around the sizes of pairs, groups, partial sums, panels, tiles and blocks.
const SHAPES: [(usize, usize); 9] =
    [(1, 1), (2, 16), (31, 17), (33, 64), (64, 128), (511, 63), (512, 65), (513, 129), (1057, 200)];

struct Layer {
    inputs: usize,
    features: usize,
    weight: Elements,
    bias: Elements,
}

impl Layer {
    fn random((inputs, features): (usize, usize), dtype: Dtype, seed: u64) -> Self {
        let mut generator = Generator::new(seed);
        let weight = Elements::new(dtype, &generator.reals(inputs * features));
        Self { inputs, features, weight, bias: Elements::new(dtype, &generator.reals(features)) }
    }

    fn weight(&self) -> View<'_> {
        self.weight.view(&[self.features, self.inputs])
    }

    fn bias(&self) -> View<'_> {
        self.bias.view(&[self.features])
    }

    fn pack(&self, cpu: &Cpu, format: WeightFormat) -> PackedMatrix {
        pack(cpu, self.weight(), format).expect("it fits").expect("the CPU packs")
    }

    /// `linear` of this weight, or of another.
    fn linear(&self, cpu: &Cpu, x: &Rows, weight: View<'_>) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.rows * self.features];
        let to = ViewMut::new(&mut out, &[x.rows, self.features]).expect("it fits");
        linear(cpu, x.view(), weight, Some(self.bias()), to).expect("it fits");
        out
    }
}

/// Rows of inputs with a gap after each.
struct Rows {
    rows: usize,
    inputs: usize,
    x: Vec<f32>,
}

impl Rows {
    const GAP: usize = 3;

    fn random(rows: usize, inputs: usize, seed: u64) -> Self {
        let mut x = Generator::new(seed).reals(rows * (inputs + Self::GAP));
        x.chunks_mut(inputs + Self::GAP).for_each(|row| row[inputs..].fill(f32::NAN));
        Self { rows, inputs, x }
    }

    fn view(&self) -> View<'_> {
        let strides = [self.inputs + Self::GAP, 1];
        View::strided(tilewright::tensor::Data::F32(&self.x), &[self.rows, self.inputs], &strides)
            .expect("it fits")
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// `packed_linear` with a gap after each row of the output, which must not change.
fn multiply(cpu: &Cpu, x: View<'_>, weight: PackedWeight<'_>, out_dtype: Dtype) -> Vec<f32> {
    let (rows, features) = (x.shape()[0], weight.matrix.shape()[0]);
    let mut out = Elements::filled(out_dtype, rows * (features + 5), 77.0);
    let to = out.strided_mut(0, &[rows, features], &[features + 5, 1]);
    PackedLinear { x, products: vec![PackedProduct { weight, out: to }] }.run(cpu).expect("it fits");
    let out = out.to_f32();
    let rows = out.chunks_exact(features + 5).map(|row| row.split_at(features));
    rows.flat_map(|(row, gap)| {
        assert_eq!(gap, [77.0; 5], "gaps stay as they are");
        row.to_vec()
    })
    .collect()
}

#[test]
fn segments_have_the_bits_of_linear() {
    let (indptr, ids, x) = ([0, 2, 2, 9, 10], [2, 0, 1, 2], Rows::random(10, 512, 7));
    // three weights with gaps between their rows and between each other
    let (shape, strides) = ([3, 65, 512], [514 * 65 + 1, 514, 1]);
    for dtype in DTYPES {
        let weights = Elements::new(dtype, &Generator::new(3).reals(3 * strides[0]));
        let mut out = Elements::filled(Dtype::F32, 10 * 70, 77.0);
        let to = out.strided_mut(0, &[10, 65], &[70, 1]);
        let weights = weights.strided(0, &shape, &strides);
        SegmentGemm { x: x.view(), weights, indptr: &indptr, ids: Some(&ids), out: to }
            .run(&Cpu::new())
            .expect("it fits");
        for (row, found) in out.to_f32().chunks(70).enumerate() {
            let id = ids[indptr[1..].iter().position(|&end| row < end as usize).expect("a segment")];
            let dense: Vec<f32> =
                (0..65 * 512).map(|at| weights.at(&[id as usize, at / 512, at % 512])).collect();
            let (dense, mut expected) = (Elements::new(dtype, &dense), vec![77.0; 70]);
            let of_row = View::new(&x.x[row * (512 + Rows::GAP)..][..512], &[1, 512]).expect("it fits");
            let to = ViewMut::new(&mut expected[..65], &[1, 65]).expect("it fits");
            linear(&Cpu::new(), of_row, dense.view(&[65, 512]), None, to).expect("it fits");
            assert_eq!(bits(found), bits(&expected), "{dtype}, row {row}");
        }
    }
}

#[test]
fn packed_products_have_the_bits_of_linear() {
    for (number, &shape) in SHAPES.iter().enumerate() {
        for dtype in DTYPES {
            let layer = Layer::random(shape, dtype, number as u64);
            for cpu in cpus(2) {
                let matrix = layer.pack(&cpu, WeightFormat::Float(dtype));
                let bias = Some(layer.bias());
                for rows in (1..=9).chain([65, 257]) {
                    let x = Rows::random(rows, layer.inputs, 40 + rows as u64);
                    let expected = layer.linear(&cpu, &x, layer.weight());
                    let weight = PackedWeight { matrix: &matrix, bias };
                    let out = multiply(&cpu, x.view(), weight, Dtype::F32);
                    assert_eq!(bits(&out), bits(&expected), "{}, {dtype} {shape:?}, {rows} rows", cpu.isa());
                }
            }
        }
    }
}

/// Whether int4 weights are multiplied by bf16 dot products.
fn rounds_inputs(cpu: &Cpu, format: WeightFormat) -> bool {
    format == WeightFormat::Int4 && matches!(cpu.isa(), Isa::Avx512Bf16 | Isa::Amx)
}

/// Integers and scales are exact in f32, so quantized products are those of the dequantized matrix.
#[test]
fn quantized_products_have_the_bits_of_the_dequantized_matrix() {
    for (number, &shape) in SHAPES.iter().enumerate() {
        for format in QUANTIZED {
            let layer = Layer::random(shape, Dtype::Bf16, number as u64);
            for cpu in cpus(2).into_iter().filter(|cpu| !rounds_inputs(cpu, format)) {
                let matrix = layer.pack(&cpu, format);
                let rows: Vec<f32> = (0..layer.features).flat_map(|feature| matrix.row(feature)).collect();
                let dequantized = Elements::new(Dtype::F32, &rows);
                let weight = PackedWeight { matrix: &matrix, bias: Some(layer.bias()) };
                for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 65] {
                    let x = Rows::random(rows, layer.inputs, 40 + rows as u64);
                    let dequantized = dequantized.view(&[layer.features, layer.inputs]);
                    let expected = layer.linear(&cpu, &x, dequantized);
                    let out = multiply(&cpu, x.view(), weight, Dtype::F32);
                    assert_eq!(
                        bits(&out),
                        bits(&expected),
                        "{}, {format:?} {shape:?}, {rows} rows",
                        cpu.isa()
                    );
                }
            }
        }
    }
}

/// Each input and each group adds one rounding of f32, to a value of at most the sum of the magnitudes. A row has the same bits
/// alone and among others.
#[test]
fn int4_products_of_dot_products_round_inputs_to_bf16() {
    let int4 = WeightFormat::Int4;
    for (number, &shape) in SHAPES.iter().enumerate() {
        let layer = Layer::random(shape, Dtype::Bf16, number as u64);
        let bias = layer.bias.to_f32();
        for cpu in cpus(2).into_iter().filter(|cpu| rounds_inputs(cpu, int4)) {
            let matrix = layer.pack(&cpu, int4);
            let weight = PackedWeight { matrix: &matrix, bias: Some(layer.bias()) };
            for rows in [1, 2, 3, 4, 5, 7, 8, 9, 17, 65] {
                let x = Rows::random(rows, layer.inputs, 40 + rows as u64);
                let out = multiply(&cpu, x.view(), weight, Dtype::F32);
                for (row, out) in x.x.chunks(layer.inputs + Rows::GAP).zip(out.chunks(layer.features)) {
                    let row = &row[..layer.inputs];
                    let alone = View::new(row, &[1, layer.inputs]).expect("it fits");
                    let alone = multiply(&cpu, alone, weight, Dtype::F32);
                    assert_eq!(bits(&alone), bits(out), "{} {shape:?}, {rows} rows", cpu.isa());
                    for (feature, &out) in out.iter().enumerate() {
                        let terms = matrix.row(feature).into_iter().zip(row);
                        let terms = terms.map(|(w, x)| f64::from(w) * f64::from(round(Dtype::Bf16, *x)));
                        let (sum, magnitude) = terms
                            .fold((f64::from(bias[feature]), 0.0), |(sum, all), term| {
                                (sum + term, all + term.abs())
                            });
                        let roundings = (layer.inputs + layer.inputs.div_ceil(GROUP) + 1) as f64;
                        let bound = roundings * 2f64.powi(-24) * (magnitude + f64::from(bias[feature]).abs());
                        let error = (f64::from(out) - sum).abs();
                        assert!(error <= bound, "{} {shape:?}: {error} above {bound}", cpu.isa());
                    }
                }
            }
        }
    }
}

/// int8 rounds to half a step; the scale is at most 2^-8 off, so values near the maximum may be clamped by as much.
#[test]
fn quantization_errors_are_below_a_step() {
    let layer = Layer::random((1057, 33), Dtype::F32, 5);
    let weights = layer.weight.to_f32();
    for (format, steps, slack) in
        [(WeightFormat::Int8, 127.0, 0.5 + 127.0 / 256.0), (WeightFormat::Int4, 8.0, 1.05)]
    {
        let matrix = layer.pack(&Cpu::with_threads(2).unwrap(), format);
        for (feature, row) in weights.chunks_exact(1057).enumerate() {
            let stored = matrix.row(feature);
            for (weights, stored) in row.chunks(GROUP).zip(stored.chunks(GROUP)) {
                let step = weights.iter().fold(0.0, |max: f32, w| max.max(w.abs())) / steps;
                for (weight, stored) in weights.iter().zip(stored) {
                    assert!((weight - stored).abs() <= slack * step, "{format:?}: {weight} became {stored}");
                }
            }
        }
    }
    let bytes = |format| layer.pack(&Cpu::with_threads(1).unwrap(), format).bytes();
    // whole tiles of 64 features and whole groups
    let formats = [WeightFormat::Int8, WeightFormat::Int4, WeightFormat::Float(Dtype::F32)];
    assert_eq!(formats.map(bytes), [64 * (1088 + 2 * 34), 64 * (544 + 2 * 34), 64 * 4 * 1088]);
}

#[test]
fn groups_of_zeros_and_of_nonfinite_weights_stay_in_their_feature() {
    let mut weights = vec![0.25; 3 * 64];
    weights[..32].fill(0.0);
    weights[70] = f32::NAN;
    weights[140] = f32::INFINITY;
    let cpu = Cpu::with_threads(1).unwrap();
    for format in QUANTIZED {
        let weight = Elements::new(Dtype::F32, &weights);
        let matrix = pack(&cpu, weight.view(&[3, 64]), format).unwrap().expect("the CPU packs");
        let zeros = matrix.row(0);
        assert!(zeros[..32].iter().all(|w| *w == 0.0) && zeros[32..].iter().all(|w| (w - 0.25).abs() < 0.01));
        assert!(matrix.row(2)[..32].iter().any(|w| !w.is_finite()), "{format:?} keeps an infinity visible");
        assert!(matrix.row(2)[32..].iter().all(|w| w.is_finite()));
    }
}

/// Several products in one pass, and 16-bit inputs and outputs, are those of single f32 products, rounded once.
#[test]
fn several_products_and_16_bit_tensors_agree_with_single_products() {
    for cpu in cpus(2) {
        for rows in [1, 4, 9] {
            let layers = [(70, 130), (70, 16), (70, 33)].map(|shape| Layer::random(shape, Dtype::Bf16, 8));
            let matrices = layers.each_ref().map(|layer| layer.pack(&cpu, WeightFormat::Float(Dtype::Bf16)));
            let x = Rows::random(rows, 70, 3);
            let x_f16 =
                Elements::new(Dtype::F16, &x.x.iter().map(|x| round(Dtype::F16, *x)).collect::<Vec<_>>());
            let x_f16 = x_f16.strided(0, &[rows, 70], &[70 + Rows::GAP, 1]);
            let mut outs = layers.each_ref().map(|layer| vec![f32::NAN; rows * layer.features]);
            let weights = matrices.iter().zip(&layers);
            let weights = weights.map(|(matrix, layer)| PackedWeight { matrix, bias: Some(layer.bias()) });
            let weights: Vec<_> = weights.collect();
            let products = weights.iter().zip(&mut outs).map(|(&weight, out)| {
                let shape = [rows, weight.matrix.shape()[0]];
                PackedProduct { weight, out: ViewMut::new(out, &shape).expect("it fits") }
            });
            PackedLinear { x: x.view(), products: products.collect() }.run(&cpu).expect("it fits");
            for (&weight, out) in weights.iter().zip(&outs) {
                assert_eq!(bits(out), bits(&multiply(&cpu, x.view(), weight, Dtype::F32)));
                let wide = multiply(&cpu, x_f16, weight, Dtype::F32);
                let rounded: Vec<f32> = wide.iter().map(|&sum| round(Dtype::F16, sum)).collect();
                assert_eq!(bits(&multiply(&cpu, x_f16, weight, Dtype::F16)), bits(&rounded));
            }
        }
    }
}

#[test]
fn gated_products_have_the_bits_of_products_and_activation() {
    let activations = [Activation::Silu, Activation::Gelu, Activation::GeluTanh];
    for (number, shape) in [(33, 17), (513, 130), (64, 320)].into_iter().enumerate() {
        let [gate, up] = [1, 2].map(|seed| Layer::random(shape, DTYPES[number], seed));
        for cpu in cpus(2) {
            let matrices = [&gate, &up].map(|layer| layer.pack(&cpu, WeightFormat::Float(DTYPES[number])));
            for (rows, activation) in [1, 3, 8, 9, 300].into_iter().zip(activations.into_iter().cycle()) {
                let (x, features) = (Rows::random(rows, shape.0, 9), shape.1);
                let [gates, factors] = [&gate, &up].map(|layer| layer.linear(&cpu, &x, layer.weight()));
                let rows_of = |of: &[f32], row: usize| of[row * features..][..features].to_vec();
                let both = (0..rows).flat_map(|row| [rows_of(&gates, row), rows_of(&factors, row)].concat());
                let both = Elements::new(Dtype::F32, &both.collect::<Vec<f32>>());
                for dtype in [Dtype::F32, Dtype::Bf16] {
                    let mut expected = Elements::filled(dtype, rows * features, f32::NAN);
                    let to = expected.view_mut(&[rows, features]);
                    activation::act_and_mul(&cpu, activation, both.view(&[rows, 2 * features]), to).unwrap();
                    let mut out = Elements::filled(dtype, rows * features, f32::NAN);
                    let [gate, up] = [(&matrices[0], &gate), (&matrices[1], &up)]
                        .map(|(matrix, layer)| PackedWeight { matrix, bias: Some(layer.bias()) });
                    let to = out.view_mut(&[rows, features]);
                    GatedLinear { x: x.view(), gate, up, activation, out: to }.run(&cpu).expect("it fits");
                    assert_eq!(bits(&out.to_f32()), bits(&expected.to_f32()), "{}, {rows} rows", cpu.isa());
                }
            }
        }
    }
}

#[test]
fn rows_and_features_without_elements_are_no_ops() {
    let cpu = Cpu::with_threads(2).unwrap();
    for (rows, inputs, features) in [(0, 4, 4), (2, 0, 3), (2, 3, 0)] {
        let layer = Layer::random((inputs, features), Dtype::F32, 1);
        let matrix = layer.pack(&cpu, WeightFormat::Float(Dtype::F32));
        let x = Rows::random(rows, inputs, 1);
        let out =
            multiply(&cpu, x.view(), PackedWeight { matrix: &matrix, bias: Some(layer.bias()) }, Dtype::F32);
        let expected: Vec<f32> = (0..rows).flat_map(|_| layer.bias.to_f32()).collect();
        assert_eq!(out, if inputs == 0 { expected } else { Vec::new() });
    }
}

#[test]
fn wrong_arguments_are_named() {
    let cpu = Cpu::with_threads(1).unwrap().with_isa(Isa::Portable).unwrap();
    let layer = Layer::random((4, 3), Dtype::Bf16, 1);
    let matrix = layer.pack(&cpu, WeightFormat::Int8);
    let error = |view: View<'_>, format| pack(&cpu, view, format).expect_err("it is wrong").to_string();
    let format = WeightFormat::Float(Dtype::F16);
    assert_eq!(error(layer.weight(), format), "gemm.pack: format = f16, expected the weight's dtype bf16");
    let shape = "gemm.pack: weight has shape [3], expected [out_features, in_features]";
    assert_eq!(error(layer.bias(), WeightFormat::Int4), shape);

    let x = Elements::new(Dtype::F32, &[0.0; 10]);
    let weight = PackedWeight { matrix: &matrix, bias: None };
    let run = |x: View<'_>, weight: PackedWeight<'_>, out: &[usize]| {
        let mut memory = Elements::filled(Dtype::F32, out.iter().product(), 0.0);
        let product = PackedProduct { weight, out: memory.view_mut(out) };
        PackedLinear { x, products: vec![product] }.run(&cpu).expect_err("it is wrong").to_string()
    };
    assert_eq!(
        run(x.view(&[2, 5]), weight, &[2, 3]),
        "gemm.packed_linear: x has shape [2, 5], expected [rows, in_features] = [2, 4]"
    );
    assert_eq!(
        run(x.strided(0, &[2, 4], &[4, 1]), weight, &[2, 4]),
        "gemm.packed_linear: out has shape [2, 4], expected [rows, out_features] = [2, 3]"
    );
    let bias = PackedWeight { bias: Some(x.strided(0, &[4], &[1])), ..weight };
    assert_eq!(
        run(x.strided(0, &[2, 4], &[4, 1]), bias, &[2, 3]),
        "gemm.packed_linear: bias has shape [4], expected [out_features] = [3]"
    );
    let other = Layer::random((4, 5), Dtype::Bf16, 1).pack(&cpu, WeightFormat::Int8);
    let mut out = Elements::filled(Dtype::F32, 6, 0.0);
    let gated = GatedLinear {
        x: x.strided(0, &[2, 4], &[4, 1]),
        gate: weight,
        up: PackedWeight { matrix: &other, bias: None },
        activation: Activation::Silu,
        out: out.view_mut(&[2, 3]),
    };
    let text = "gemm.gated_linear: gate has shape [3, 4], up has [5, 4]";
    assert_eq!(gated.run(&cpu).expect_err("it is wrong").to_string(), text);
    assert!(cpu.describe().contains("portable"));
}

/// Scale and integers of a group, from the numbers of feature and group.
fn group(format: WeightFormat, feature: usize, group: usize) -> (bf16, [i8; GROUP]) {
    let (low, count) = if format == WeightFormat::Int8 { (-127, 255) } else { (-8, 16) };
    let integer = |input: usize| (low + (31 * feature + 7 * group + 3 * input) as i32 % count) as i8;
    (bf16::from_f32(1.0 / (1 + feature + 2 * group) as f32), std::array::from_fn(integer))
}

#[test]
fn groups_quantized_elsewhere_are_stored_without_rounding() {
    for format in QUANTIZED {
        for (features, groups) in [(1, 1), (16, 2), (17, 3), (40, 0)] {
            let packed =
                PackedMatrix::from_groups(format, [features, GROUP * groups], |f, g| group(format, f, g));
            let packed = packed.expect("a good matrix");
            assert_eq!((packed.format(), packed.shape()), (format, [features, GROUP * groups]));
            for feature in 0..features {
                let values = |g| {
                    let (scale, integers) = group(format, feature, g);
                    integers.map(|integer| f32::from(integer) * scale.to_f32())
                };
                let expected: Vec<f32> = (0..groups).flat_map(values).collect();
                assert_eq!(packed.row(feature), expected, "{format:?}, feature {feature}");
            }
        }
    }
}

#[test]
fn groups_that_do_not_fit_the_format_are_rejected() {
    let reject = |format, inputs, integer: i8| {
        let group =
            |feature, group| (bf16::ONE, [if (feature, group) == (1, 2) { integer } else { 0 }; GROUP]);
        PackedMatrix::from_groups(format, [2, inputs], group).expect_err("a bad matrix").to_string()
    };
    assert_eq!(
        reject(WeightFormat::Float(Dtype::F32), 96, 0),
        "gemm.from_groups: format = f32, expected int8 or int4"
    );
    assert_eq!(
        reject(WeightFormat::Int8, 95, 0),
        "gemm.from_groups: in_features = 95 is not a multiple of 32, the inputs of a scale"
    );
    for (format, integer, range) in [
        (WeightFormat::Int8, -128, "-127 to 127"),
        (WeightFormat::Int4, 8, "-8 to 7"),
        (WeightFormat::Int4, -9, "-8 to 7"),
    ] {
        let expected = format!("gemm.from_groups: feature 1, group 2: integer = {integer}, expected {range}");
        assert_eq!(reject(format, 96, integer), expected);
    }
}
