//! Matrix products.

use super::{HOPPER, KernelEntry, entry, entry_with, named_entry};
use crate::gemm::{Epilogue, GemmKernel, dot, skinny, sm80, sm90, tiles};
use tilewright::Dtype;
use tilewright_ptx::{ir::Kernel, verify::Invalid};

pub(super) fn all() -> Vec<KernelEntry> {
    let (bf16, f32, f16) = (Dtype::Bf16, Dtype::F32, Dtype::F16);
    let epilogue = |bias, out| Epilogue { bias, out, paired: true, grouped: false };
    let sm90 = |tile_columns: usize, epilogue| {
        let config = sm90::Sm90Config { elements: bf16, tile_columns, epilogue };
        entry_with(config.name(), HOPPER, move |name| sm90::gemm(name, config))
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
    let build: fn(&str, GemmKernel) -> Result<Kernel, Invalid> = |name, choice| choice.kernel(name);
    let large = matrix(bf16, true, epilogue(None, bf16));
    let mut all = vec![
        named_entry("gemm_sm80".to_owned(), large, build),
        sm90(128, epilogue(None, f32)),
        sm90(256, epilogue(Some(bf16), bf16)),
    ];
    all.extend(choices.map(|choice| entry(choice, GemmKernel::name, build)));
    all
}
