//! The `wgmma` GEMM.

use crate::real::noise;
use half::bf16;
use tilewright_kernels::gemm::sm90::{Sm90Config, TILE_ROWS, gemm};
use tilewright_kernels::tile::panel_map;
use tilewright_ptx::sim::{Arg, Launch, Memory};

#[test]
fn odd_shapes_with_many_seeds() {
    for tile_columns in [128, 256] {
        for shape in [[1, 8, 8], [130, 264, 200], [300, 136, 72]] {
            for seed in 0..4 {
                product(Sm90Config { tile_columns }, shape, seed);
            }
        }
    }
}

#[test]
fn one_product_with_many_seeds() {
    for tile_columns in [128, 256] {
        (0..32).for_each(|seed| product(Sm90Config { tile_columns }, [200, 136, 264], seed));
    }
}

fn map(at: u64, [rows, columns]: [usize; 2], box_rows: usize) -> Arg {
    Arg::TensorMap(panel_map(at, &[columns as u64, rows as u64], &[columns as u64 * 2], box_rows).into())
}

fn product(config: Sm90Config, [m, n, k]: [usize; 3], seed: u64) {
    let kernel = gemm("gemm", config).expect("a valid kernel");
    let (a, b) = (noise(m * k, 1), noise(n * k, 2));
    let mut memory = Memory::new();
    let (a_at, b_at, d_at) = (memory.alloc_from(&a), memory.alloc_from(&b), memory.alloc(m * n * 2));
    let args = [
        map(a_at, [m, k], TILE_ROWS),
        map(b_at, [n, k], config.tile_columns),
        map(d_at, [m, n], 64),
        Arg::U32(m as u32),
        Arg::U32(n as u32),
        Arg::U32(k as u32),
    ];
    let run = Launch { kernel: &kernel, grid: [2, 1, 1], args: &args, seed }.run(&mut memory);
    run.unwrap_or_else(|fault| panic!("{config:?} {m}x{n}x{k}, seed {seed}: {fault}"));
    let d: Vec<bf16> = memory.read(d_at, m * n).unwrap_or_else(|fault| panic!("d, seed {seed}: {fault}"));
    judge((&a, &b, &d), [m, n, k]);
}

fn judge((a, b, d): (&[bf16], &[bf16], &[bf16]), [m, n, k]: [usize; 3]) {
    for (at, found) in d.iter().enumerate() {
        let (row, column) = (at / n, at % n);
        let terms = (0..k).map(|i| a[row * k + i].to_f64() * b[column * k + i].to_f64());
        let (expected, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
        // f32 accumulation, one rounding to bf16
        let tolerance = expected.abs() / 256.0 + size * 1e-6 + 1e-30;
        let found = found.to_f64();
        assert!(
            (found - expected).abs() <= tolerance,
            "{m}x{n}x{k}: d[{row}, {column}] = {found}, not {expected}"
        );
    }
}
