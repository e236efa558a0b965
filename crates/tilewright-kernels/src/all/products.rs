//! Matrix products.

use super::{ALL, HOPPER, KernelEntry, entry_with};
use crate::gemm::{Epilogue, GemmKernel, dot, skinny, sm80, sm90, tiles};
use tilewright::Dtype;

pub(super) fn all() -> Vec<KernelEntry> {
    let (bf16, f32, f16) = (Dtype::Bf16, Dtype::F32, Dtype::F16);
    let epilogue = |bias, out| Epilogue { bias, out, paired: true, grouped: false };
    let sm90 = |tile_columns: usize, epilogue| {
        entry_of(GemmKernel::Sm90(sm90::Sm90Config { elements: bf16, tile_columns, epilogue }))
    };
    let matrix = |elements, large, epilogue| GemmKernel::Sm80(sm80::Sm80Config { elements, large, epilogue });
    let skinny = |rows, warps| {
        let epilogue = epilogue(None, bf16);
        GemmKernel::Skinny(skinny::SkinnyConfig { elements: bf16, warps, rows, epilogue })
    };
    let dot = |rows, x, width| {
        GemmKernel::Dot(dot::DotConfig { x, weight: bf16, width, rows, epilogue: epilogue(Some(bf16), x) })
    };
    let grouped = Epilogue { bias: None, out: f32, paired: false, grouped: true };
    let choices = [
        matrix(bf16, false, epilogue(Some(bf16), bf16)),
        matrix(f16, true, grouped),
        skinny(8, 8),
        skinny(32, 16),
        dot(1, bf16, 8),
        dot(8, f32, 4),
        GemmKernel::Tiles(tiles::TilesConfig {
            x: f32,
            weight: bf16,
            width: 4,
            epilogue: epilogue(None, f32),
        }),
        GemmKernel::Tiles(tiles::TilesConfig { x: f16, weight: f32, width: 1, epilogue: grouped }),
    ];
    let mut all = vec![
        entry_of(matrix(bf16, true, epilogue(None, bf16))),
        sm90(128, epilogue(None, f32)),
        sm90(256, epilogue(Some(bf16), bf16)),
    ];
    all.extend(choices.map(entry_of));
    all
}

/// The entry of a kernel for its architectures.
pub(super) fn entry_of(kernel: GemmKernel) -> KernelEntry {
    let archs = if matches!(kernel, GemmKernel::Sm90(_)) { HOPPER } else { ALL };
    entry_with(kernel.name(), archs, move |name| kernel.kernel(name))
}
