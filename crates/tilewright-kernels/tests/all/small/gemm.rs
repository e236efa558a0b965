//! Matrix products: every kernel, ragged shapes, every epilogue, groups.

use super::{SEEDS, simulate};
use crate::real::{Real, assert_near, noise};
use half::{bf16, f16};
use tilewright::Dtype;
use tilewright_kernels::gemm::{
    Epilogue, GemmKernel, GemmParams, Groups, Matrix, dot, skinny, sm80, sm90, tiles,
};
use tilewright_ptx::Memory;

/// A product in the simulator with its expected result.
struct GemmCase {
    memory: Memory,
    product: GemmParams,
    expected: Vec<f64>,
    /// Sums of magnitudes, the scale of errors.
    sizes: Vec<f64>,
}

impl GemmCase {
    /// Noise of these shapes; rows have `gap` padding elements: NaN in x and the weight, unwritten in the result.
    fn new<X: Real, W: Real, O: Real>([rows, features, inputs]: [usize; 3], bias: bool, gap: usize) -> Self {
        let mut memory = Memory::new();
        let (stride, out_stride) = (inputs + gap, features + gap);
        let (x, weight) = (padded::<X>([rows, inputs], gap, 1), padded::<W>([features, inputs], gap, 2));
        let biases = noise::<W>(features, 3);
        // decoded once: each result reads a row of both
        let wide_x: Vec<f64> = x.iter().map(|&x| x.wide()).collect();
        let wide_weight: Vec<f64> = weight.iter().map(|&weight| weight.wide()).collect();
        let (mut expected, mut sizes) = (Vec::new(), Vec::new());
        for (row, feature) in (0..rows).flat_map(|row| (0..features).map(move |feature| (row, feature))) {
            let terms = wide_x[row * stride..][..inputs].iter().zip(&wide_weight[feature * stride..]);
            let terms = terms.map(|(x, weight)| x * weight);
            let start = if bias { biases[feature].wide() } else { 0.0 };
            expected.push(terms.clone().sum::<f64>() + start);
            sizes.push(terms.map(f64::abs).sum::<f64>() + start.abs());
        }
        let out = memory.alloc(rows * out_stride * size_of::<O>());
        let product = GemmParams {
            shape: [rows, features, inputs].map(|n| n as u32),
            x: Matrix { dtype: X::DTYPE, address: memory.alloc_from(&x), stride: stride as u64 },
            weight: Matrix { dtype: W::DTYPE, address: memory.alloc_from(&weight), stride: stride as u64 },
            bias: bias.then(|| (W::DTYPE, memory.alloc_from(&biases))),
            out: Matrix { dtype: O::DTYPE, address: out, stride: out_stride as u64 },
            groups: None,
        };
        Self { memory, product, expected, sizes }
    }

    fn epilogue(&self) -> Epilogue {
        let product = self.product;
        let paired = product.shape[1].is_multiple_of(2) && product.out.stride.is_multiple_of(2);
        Epilogue { bias: product.bias.map(|bias| bias.0), out: product.out.dtype, paired, grouped: false }
    }

    fn run<O: Real>(&mut self, choice: GemmKernel, seed: u64) {
        let kernel = choice.kernel("gemm").expect("a valid kernel");
        let (grid, args) = self.product.launch(choice, 2);
        let what = format!("{choice:?} {:?}", self.product);
        simulate(&what, &kernel, (grid, &args), seed, &mut self.memory);
        let [rows, features, _] = self.product.shape.map(|n| n as usize);
        for row in 0..rows {
            let at =
                self.product.out.address + (row as u64 * self.product.out.stride) * size_of::<O>() as u64;
            let found: Vec<O> = self.memory.read(at, features).expect("a row that was written");
            for (feature, found) in found.into_iter().enumerate() {
                let i = row * features + feature;
                let what = format!("{what}: row {row}, feature {feature}");
                assert_near(&what, found, self.expected[i], (2e-6, self.sizes[i]));
            }
            for element in features..self.product.out.stride as usize {
                let at = at + (element * size_of::<O>()) as u64;
                assert!(self.memory.read::<O>(at, 1).is_err(), "{what}: row {row}, padding {element}");
            }
        }
    }
}

/// Noise in rows with `gap` NaN after each.
fn padded<T: Real>([rows, width]: [usize; 2], gap: usize, seed: u64) -> Vec<T> {
    let mut values = noise::<T>(rows * (width + gap), seed);
    values.chunks_mut((width + gap).max(1)).for_each(|row| row[width..].fill(T::of(f64::NAN)));
    values
}

#[test]
fn few_rows() {
    for (rows, features, inputs) in [(1, 5, 264), (2, 16, 1100), (3, 7, 8), (8, 9, 2100)] {
        for (bias, width) in [(true, 8), (false, 1)] {
            let mut case = GemmCase::new::<bf16, bf16, bf16>([rows, features, inputs / 8 * 8], bias, 8);
            let (x, weight, epilogue) = (Dtype::Bf16, Dtype::Bf16, case.epilogue());
            let rows = rows.next_power_of_two() as u32;
            case.run::<bf16>(GemmKernel::Dot(dot::DotConfig { x, weight, width, rows, epilogue }), 0);
        }
        let mut case = GemmCase::new::<f32, f16, f32>([rows, features, inputs], true, 4);
        let choice = case.product.choose_kernel(80, 4);
        assert!(matches!(choice, GemmKernel::Dot(dot::DotConfig { width: 4, .. })), "{choice:?}");
        case.run::<f32>(choice, 1);
    }
}

#[test]
fn few_rows_on_tensor_cores() {
    for (rows, features, inputs) in [(1, 16, 8), (5, 40, 328), (8, 17, 2048), (20, 33, 1112), (32, 16, 4096)]
    {
        let size = (rows as u32).next_power_of_two().max(8);
        let mut case = GemmCase::new::<bf16, bf16, bf16>([rows, features, inputs], features % 2 == 1, 8);
        let epilogue = case.epilogue();
        case.run::<bf16>(
            GemmKernel::Skinny(skinny::SkinnyConfig {
                elements: Dtype::Bf16,
                warps: 8,
                rows: size,
                epilogue,
            }),
            0,
        );
        let mut case = GemmCase::new::<f16, f16, f32>([rows, features, inputs], true, 8);
        let epilogue = case.epilogue();
        case.run::<f32>(
            GemmKernel::Skinny(skinny::SkinnyConfig {
                elements: Dtype::F16,
                warps: 16,
                rows: size,
                epilogue,
            }),
            1,
        );
    }
}

/// Products of bf16 with a bias, and of f16 to f32.
fn run_16_bits(shape: [usize; 3], gap: usize, seed: u64, kernel: impl Fn(Dtype, Epilogue) -> GemmKernel) {
    let mut case = GemmCase::new::<bf16, bf16, bf16>(shape, true, gap);
    case.run::<bf16>(kernel(Dtype::Bf16, case.epilogue()), seed);
    let mut case = GemmCase::new::<f16, f16, f32>(shape, false, gap);
    case.run::<f32>(kernel(Dtype::F16, case.epilogue()), seed);
}

#[test]
fn many_rows_on_tensor_cores() {
    for (seed, large) in [(0, false), (1, true), (2, false), (3, true)] {
        for (shape, gap) in [([9, 8, 8], 8), ([130, 264, 200], 0), ([100, 136, 72], 8), ([56, 31, 64], 0)] {
            run_16_bits(shape, gap, seed, |elements, epilogue| {
                GemmKernel::Sm80(sm80::Sm80Config { elements, large, epilogue })
            });
        }
    }
}

/// Rows are aligned to 16 bytes, but their length is not a multiple of a chunk.
#[test]
fn ragged_inputs_on_tensor_cores() {
    let (stride, mut memory) = (72, Memory::new());
    for inputs in [1_usize, 65, 67] {
        let (x, weight) = (noise::<bf16>(5 * stride, 1), noise::<bf16>(6 * stride, 2));
        let matrix = |address, stride| Matrix { dtype: Dtype::Bf16, address, stride };
        let product = GemmParams {
            shape: [5, 6, inputs as u32],
            x: matrix(memory.alloc_from(&x), stride as u64),
            weight: matrix(memory.alloc_from(&weight), stride as u64),
            bias: None,
            out: matrix(memory.alloc(5 * 6 * 2), 6),
            groups: None,
        };
        let epilogue = Epilogue { bias: None, out: Dtype::Bf16, paired: true, grouped: false };
        let choice = GemmKernel::Sm80(sm80::Sm80Config { elements: Dtype::Bf16, large: false, epilogue });
        let (grid, args) = product.launch(choice, 4);
        simulate("ragged", &choice.kernel("gemm").expect("a kernel"), (grid, &args), 0, &mut memory);
        let found: Vec<bf16> = memory.read(product.out.address, 30).expect("a result");
        for (at, found) in found.into_iter().enumerate() {
            let terms = x[at / 6 * stride..][..inputs].iter().zip(&weight[at % 6 * stride..]);
            let expected: f64 = terms.map(|(x, w)| x.wide() * w.wide()).sum();
            assert_near(&format!("{inputs} inputs, {at}"), found, expected, (1e-5, 1.0));
        }
    }
}

#[test]
fn products_of_any_dtypes() {
    for shape in [[1, 1, 1], [65, 70, 33], [68, 64, 16], [3, 130, 100]] {
        let mut case = GemmCase::new::<f32, bf16, f32>(shape, true, 3);
        let (x, weight, epilogue) = (Dtype::F32, Dtype::Bf16, case.epilogue());
        case.run::<f32>(GemmKernel::Tiles(tiles::TilesConfig { x, weight, width: 1, epilogue }), 0);
        if shape[2] % 4 == 0 {
            let mut case = GemmCase::new::<bf16, f32, f16>(shape, false, 8);
            let (x, weight, epilogue) = (Dtype::Bf16, Dtype::F32, case.epilogue());
            case.run::<f16>(GemmKernel::Tiles(tiles::TilesConfig { x, weight, width: 4, epilogue }), 1);
        }
    }
}

/// More rows of tiles than a band of 16 has.
#[test]
fn two_bands_on_hopper() {
    let mut case = GemmCase::new::<bf16, bf16, bf16>([2100, 8, 8], false, 0);
    let (elements, epilogue) = (Dtype::Bf16, case.epilogue());
    case.run::<bf16>(GemmKernel::Sm90(sm90::Sm90Config { elements, tile_columns: 128, epilogue }), 0);
}

/// Two CTAs process all tiles.
#[test]
fn many_rows_on_hopper() {
    for seed in 0..SEEDS {
        // the last pair of odd features is in another block for each seed
        let odd = 31 + 24 * (seed as usize / 4);
        let shapes = [([1, 8, 8], 8), ([130, 264, 200], 0), ([300, 136, 72], 8), ([10, odd, 64], 0)];
        let (shape, gap) = shapes[seed as usize % 4];
        let tile_columns = if seed / 4 % 2 == 0 { 128 } else { 256 };
        run_16_bits(shape, gap, seed, |elements, epilogue| {
            GemmKernel::Sm90(sm90::Sm90Config { elements, tile_columns, epilogue })
        });
    }
}

/// Rows of odd strides, whose last pair of features is in each block of 8 columns once.
#[test]
fn pairs_end_in_any_block_on_hopper() {
    for block in 0..32 {
        let mut case = GemmCase::new::<bf16, bf16, bf16>([1, 8 * block + 2, 9], false, 7);
        let (elements, epilogue) = (Dtype::Bf16, case.epilogue());
        let tile_columns = if block < 16 { 128 } else { 256 };
        case.run::<bf16>(GemmKernel::Sm90(sm90::Sm90Config { elements, tile_columns, epilogue }), 0);
    }
}

#[test]
fn without_inputs_the_result_is_the_bias() {
    for rows in [1, 9, 70] {
        let mut case = GemmCase::new::<f32, f32, f32>([rows, 5, 0], true, 0);
        let choice = case.product.choose_kernel(80, 4);
        case.run::<f32>(choice, 0);
    }
}

/// Three segments, one of them empty, with weights 2, 0 and 1, or their own numbers.
#[test]
fn segments_have_weights_of_their_own() {
    let indptr = [0_i32, 70, 70, 75];
    for (aligned, inputs, with_ids) in [(true, 72, true), (false, 33, true), (true, 72, false)] {
        let ids = if with_ids { [2, 0, 1] } else { [0, 1, 2] };
        let (features, rows, mut memory) = (20, 75, Memory::new());
        let (x, weights) = (noise::<bf16>(rows * inputs, 1), noise::<bf16>(3 * features * inputs, 2));
        let ids_at = if with_ids { memory.alloc_from(&ids.map(|id| id as i32)) } else { 0 };
        let matrix = |address, stride| Matrix { dtype: Dtype::Bf16, address, stride: stride as u64 };
        let product = GemmParams {
            shape: [rows, features, inputs].map(|n| n as u32),
            x: matrix(memory.alloc_from(&x), inputs),
            weight: matrix(memory.alloc_from(&weights), inputs),
            bias: None,
            out: matrix(memory.alloc(rows * features * 2), features),
            groups: Some(Groups {
                indptr: memory.alloc_from(&indptr),
                ids: ids_at,
                segments: 3,
                longest: 70,
                stride: (features * inputs) as u64,
            }),
        };
        let choice = product.choose_kernel(80, 4);
        assert_eq!(matches!(choice, GemmKernel::Sm80(_)), aligned, "{choice:?}");
        let kernel = choice.kernel("gemm").expect("a valid kernel");
        let (grid, args) = product.launch(choice, 4);
        simulate("groups", &kernel, (grid, &args), 0, &mut memory);
        let found: Vec<bf16> = memory.read(product.out.address, rows * features).expect("all rows");
        for (at, found) in found.into_iter().enumerate() {
            let (row, feature) = (at / features, at % features);
            let weight = ids[if row < 70 { 0 } else { 2 }] * features + feature;
            let terms = x[row * inputs..][..inputs].iter().zip(&weights[weight * inputs..]);
            let expected: f64 = terms.map(|(x, w)| x.wide() * w.wide()).sum();
            assert_near(&format!("row {row}, feature {feature}"), found, expected, (1e-5, 1.0));
        }
    }
}

#[test]
fn selects_the_kernel_by_shape_and_dtype() {
    let choose_on =
        |arch, shape| GemmCase::new::<bf16, bf16, bf16>(shape, false, 0).product.choose_kernel(arch, 4);
    let choose_kernel = |shape| choose_on(80, shape);
    assert!(matches!(choose_kernel([1, 16, 64]), GemmKernel::Dot(_)));
    assert!(matches!(choose_kernel([16, 16, 64]), GemmKernel::Skinny(skinny::SkinnyConfig { rows: 16, .. })));
    assert!(matches!(choose_kernel([40, 16, 64]), GemmKernel::Sm80(sm80::Sm80Config { large: false, .. })));
    assert!(matches!(choose_kernel([256, 256, 64]), GemmKernel::Sm80(sm80::Sm80Config { large: true, .. })));
    assert!(matches!(choose_kernel([40, 16, 65]), GemmKernel::Tiles(tiles::TilesConfig { width: 1, .. })));
    let tile_columns = |arch, shape| match choose_on(arch, shape) {
        GemmKernel::Sm90(config) => Some(config.tile_columns),
        _ => None,
    };
    assert_eq!(tile_columns(90, [256, 512, 64]), Some(256));
    assert_eq!(tile_columns(90, [256, 256, 64]), Some(128));
    let others = [(90, [64, 256, 64]), (90, [256, 256, 65]), (100, [256, 512, 64])];
    assert_eq!(others.map(|(arch, shape)| tile_columns(arch, shape)), [None; 3]);
    let mixed = GemmCase::new::<f32, bf16, f32>([40, 16, 64], false, 0).product.choose_kernel(80, 4);
    assert!(matches!(mixed, GemmKernel::Tiles(tiles::TilesConfig { width: 4, .. })));
}
