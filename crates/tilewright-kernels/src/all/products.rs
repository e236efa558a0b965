//! Matrix products.

use super::{Configured, HOPPER, called, of, plain};
use crate::gemm::{Choice, Ends, dot, skinny, sm80, sm90, tiles};
use tilewright::Dtype;
use tilewright_ptx::{ir::Kernel, verify::Invalid};

pub(super) fn all() -> Vec<Configured> {
    let sm90 = |tile_columns: usize| {
        let config = sm90::Gemm { tile_columns };
        plain(format!("gemm_sm90_128x{tile_columns}"), HOPPER, move |name| sm90::gemm(name, config))
    };
    let (bf16, f32, f16) = (Dtype::Bf16, Dtype::F32, Dtype::F16);
    let ends = |bias, out| Ends { bias, out, pairs: true, grouped: false };
    let matrix = |elements, large, ends| Choice::Sm80(sm80::Gemm { elements, large, ends });
    let skinny = |rows| Choice::Skinny(skinny::Skinny { elements: bf16, rows, ends: ends(None, bf16) });
    let dot =
        |rows, x, width| Choice::Dot(dot::Dot { x, weight: bf16, width, rows, ends: ends(Some(bf16), x) });
    let grouped = Ends { bias: None, out: f32, pairs: false, grouped: true };
    let choices = [
        matrix(bf16, false, ends(Some(bf16), bf16)),
        matrix(f16, true, grouped),
        skinny(8),
        skinny(32),
        dot(1, bf16, 8),
        dot(8, f32, 4),
        Choice::Tiles(tiles::Tiles { x: f32, weight: bf16, width: 4, ends: ends(None, f32) }),
        Choice::Tiles(tiles::Tiles { x: f16, weight: f32, width: 1, ends: grouped }),
    ];
    let build: fn(&str, Choice) -> Result<Kernel, Invalid> = |name, choice| choice.kernel(name);
    let large = matrix(bf16, true, ends(None, bf16));
    let mut all = vec![called("gemm_sm80".to_owned(), large, build), sm90(128), sm90(256)];
    all.extend(choices.map(|choice| of(choice, Choice::name, build)));
    all
}
