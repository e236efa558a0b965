//! `linear` against f64 over dtypes, odd shapes, bias and strides; batch invariance of rows.

use crate::{Elements, Generator, cpus, round};
use tilewright::{Backend, Cpu, Dtype, gemm::linear};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// One product in f32.
struct Product {
    rows: usize,
    inputs: usize,
    features: usize,
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Product {
    fn random((rows, inputs, features): (usize, usize, usize), dtype: Dtype, seed: u64) -> Self {
        let mut generator = Generator::new(seed);
        let x = generator.reals(rows * inputs);
        let mut rounded = |count| generator.reals(count).into_iter().map(|v| round(dtype, v)).collect();
        let (weight, bias) = (rounded(features * inputs), rounded(features));
        Self { rows, inputs, features, x, weight, bias }
    }

    /// Runs with `gap` unused elements after each row of x and of the output.
    fn run<B: Backend>(&self, backend: &B, dtype: Dtype, with_bias: bool, gap: usize) -> Vec<f32> {
        let (x_stride, out_stride) = (self.inputs + gap, self.features + gap);
        let mut x = Elements::filled(Dtype::F32, self.rows * x_stride, f32::NAN);
        for (row, values) in self.x.chunks_exact(self.inputs).enumerate() {
            x.write(row * x_stride, values);
        }
        let (weight, bias) = (Elements::new(dtype, &self.weight), Elements::new(dtype, &self.bias));
        let mut out = Elements::filled(Dtype::F32, self.rows * out_stride, 77.0);
        linear(
            backend,
            x.strided(0, &[self.rows, self.inputs], &[x_stride, 1]),
            weight.view(&[self.features, self.inputs]),
            with_bias.then(|| bias.view(&[self.features])),
            out.strided_mut(0, &[self.rows, self.features], &[out_stride, 1]),
        )
        .expect("the tensors fit");
        let out = out.to_f32();
        let rows = out.chunks_exact(out_stride).map(|row| row.split_at(self.features));
        assert!(rows.clone().all(|(_, gap)| gap.iter().all(|v| *v == 77.0)), "gaps stay as they are");
        rows.flat_map(|(row, _)| row.to_vec()).collect()
    }

    /// Compares `out` with f64; the tolerance is the error of a plain f32 loop.
    fn check(&self, out: &[f32], with_bias: bool) {
        let terms = |row: usize, feature: usize| {
            let x = &self.x[row * self.inputs..][..self.inputs];
            x.iter().zip(&self.weight[feature * self.inputs..][..self.inputs])
        };
        let bias = |feature: usize| if with_bias { self.bias[feature] } else { 0.0 };
        let (mut truth, mut error) = (Vec::new(), f64::from(f32::EPSILON));
        for (row, feature) in (0..self.rows).flat_map(|row| (0..self.features).map(move |f| (row, f))) {
            let exact: f64 = terms(row, feature).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            let naive: f32 = terms(row, feature).map(|(x, w)| x * w).sum();
            truth.push(exact + f64::from(bias(feature)));
            error = error.max((truth[truth.len() - 1] - f64::from(naive + bias(feature))).abs());
        }
        for (at, (got, want)) in out.iter().zip(truth).enumerate() {
            let (row, feature) = (at / self.features, at % self.features);
            let difference = (f64::from(*got) - want).abs();
            assert!(difference <= 3.0 * error, "row {row}, feature {feature}: {got} instead of {want}");
        }
    }
}

fn odd_shapes_and_all_dtypes_agree_with_the_oracle<B: Backend + Clone + Sync>(backends: &[B]) {
    let mut seed = 0;
    for inputs in [1, 2, 3, 511, 512, 513, 1025] {
        for features in [1, 127, 128, 129] {
            for rows in crate::judge::subset([1, 2, 3, 64, 65, 257]) {
                seed += 1;
                let dtype = DTYPES[seed % 3];
                let product = Product::random((rows, inputs, features), dtype, seed as u64);
                for (number, cpu) in backends.iter().enumerate() {
                    let (with_bias, gap) = (!(seed / 3 + number).is_multiple_of(2), [0, 5][seed / 2 % 2]);
                    product.check(&product.run(cpu, dtype, with_bias, gap), with_bias);
                }
            }
        }
    }
}

/// `linear` of 16-bit x equals `linear` of the same numbers in f32, rounded once for 16-bit outputs.
#[test]
fn activations_of_16_bits_are_widened_and_sums_rounded_once() {
    for (shape, dtype) in [((3, 70, 130), Dtype::F16), ((1, 513, 5), Dtype::Bf16), ((0, 4, 4), Dtype::Bf16)] {
        let mut product = Product::random(shape, Dtype::Bf16, 11);
        product.x.iter_mut().for_each(|x| *x = round(dtype, *x));
        for cpu in cpus(2) {
            let expected = product.run(&cpu, Dtype::Bf16, true, 0);
            for out_dtype in [dtype, Dtype::F32] {
                let (x, weight) =
                    (Elements::new(dtype, &product.x), Elements::new(Dtype::Bf16, &product.weight));
                let bias = Elements::new(Dtype::Bf16, &product.bias);
                let mut out = Elements::filled(out_dtype, shape.0 * (shape.2 + 3), 77.0);
                let (x, weight) = (x.view(&[shape.0, shape.1]), weight.view(&[shape.2, shape.1]));
                let rows = out.strided_mut(0, &[shape.0, shape.2], &[shape.2 + 3, 1]);
                linear(&cpu, x, weight, Some(bias.view(&[shape.2])), rows).expect("the tensors fit");
                for (row, out) in out.to_f32().chunks_exact(shape.2 + 3).enumerate() {
                    let expected =
                        expected[row * shape.2..][..shape.2].iter().map(|&sum| round(out_dtype, sum));
                    assert!(out[..shape.2].iter().copied().eq(expected), "{dtype} to {out_dtype}, row {row}");
                    assert_eq!(out[shape.2..], [77.0; 3], "gaps stay as they are");
                }
            }
        }
    }
}

#[test]
fn rows_are_batch_and_thread_invariant() {
    for (inputs, features) in [(1, 5), (64, 128), (513, 129), (1025, 300)] {
        for dtype in DTYPES {
            let all = Product::random((300, inputs, features), dtype, 7);
            for cpu in cpus(2) {
                let expected = all.run(&cpu, dtype, true, 0);
                for (rows, threads) in
                    [(1, 1), (1, 4), (2, 2), (3, 1), (65, 2), (65, 4), (256, 2), (257, 1), (300, 1), (300, 4)]
                {
                    let some = Product {
                        rows,
                        x: all.x[..rows * inputs].to_vec(),
                        weight: all.weight.clone(),
                        bias: all.bias.clone(),
                        ..all
                    };
                    let other =
                        Cpu::with_threads(threads).unwrap().with_isa(cpu.isa()).expect("it is available");
                    let out = some.run(&other, dtype, true, 3);
                    let same = out.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{}, {dtype}: {rows} rows, {threads} threads, {inputs} inputs", cpu.isa());
                }
            }
        }
    }
}

fn zero_in_features_give_the_bias_and_empty_outputs_are_no_ops<B: Backend + Clone + Sync>(backends: &[B]) {
    for cpu in backends {
        for (with_bias, want) in [(true, [1.5, -2.0, 1.5, -2.0]), (false, [0.0; 4])] {
            let (x, weight) = (Elements::new(Dtype::F32, &[]), Elements::new(Dtype::F16, &[]));
            let bias = Elements::new(Dtype::Bf16, &[1.5, -2.0]);
            let mut out = Elements::filled(Dtype::F32, 4, f32::NAN);
            let bias = with_bias.then(|| bias.view(&[2]));
            linear(cpu, x.view(&[2, 0]), weight.view(&[2, 0]), bias, out.view_mut(&[2, 2]))
                .expect("they fit");
            assert_eq!(out.to_f32(), want);
        }
        for shape in [(0, 3, 4), (4, 3, 0)] {
            assert!(Product::random(shape, Dtype::F32, 1).run(cpu, Dtype::F32, true, 1).is_empty());
        }
    }
}

fn nan_and_infinity_stay_in_their_row<B: Backend + Clone + Sync>(backends: &[B]) {
    for cpu in backends {
        let clean = Product::random((5, 513, 130), Dtype::Bf16, 3);
        let expected = clean.run(cpu, Dtype::Bf16, true, 0);
        for value in [f32::NAN, f32::INFINITY] {
            let mut product = Product::random((5, 513, 130), Dtype::Bf16, 3);
            product.x[2 * 513 + 512] = value;
            let out = product.run(cpu, Dtype::Bf16, true, 0);
            for (row, (out, expected)) in out.chunks(130).zip(expected.chunks(130)).enumerate() {
                assert_eq!(out == expected, row != 2, "row {row}");
                assert!(row != 2 || out.iter().all(|v| !v.is_finite()), "row 2 shows it");
            }
        }
    }
}

crate::judge_backends!(
    odd_shapes_and_all_dtypes_agree_with_the_oracle,
    zero_in_features_give_the_bias_and_empty_outputs_are_no_ops,
    nan_and_infinity_stay_in_their_row
);
