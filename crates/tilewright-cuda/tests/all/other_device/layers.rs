//! Layers, copies, and backend functions beyond the engine's trait.

use super::{simulated, view, view_mut, zeros};
use tilewright::{
    Backend, Dtype, Operator, Result, ViewMut,
    activation::silu_and_mul,
    attention::{BitOrder, packbits_on_device},
    gather::gather_rows,
    gemm::{SegmentGemm, linear},
    kv::copy_pages,
    norm::{LayerNorm, RmsNorm, fused_add_rmsnorm, rmsnorm, rmsnorm_in_place},
    rope::{
        CosSinCache, Positions, Rope, RopeAngles, RopeRest, RopeRotation, apply_rope,
        apply_rope_with_cos_sin_cache,
    },
    tensor::{Buffer, DeviceMemory, IndexBuffer, copy},
};

const ROWS: [usize; 2] = [2, 16];

fn eight_bits<'a>(memory: &'a mut DeviceMemory, shape: &[usize]) -> Result<ViewMut<'a>> {
    memory.view_mut(Dtype::E4m3, 0, shape)
}

#[test]
fn norms_and_activations() {
    judge!("norm.rmsnorm", ["x", "out", "weight"], |gpu, [x, out, weight]| {
        rmsnorm(gpu, view(x, &ROWS), view(weight, &[16]), 1e-6, view_mut(out, &ROWS))
    });
    judge!("norm.rmsnorm_in_place", ["x", "weight"], |gpu, [x, weight]| {
        rmsnorm_in_place(gpu, view_mut(x, &ROWS), view(weight, &[16]), 1e-6)
    });
    judge!("norm.fused_add_rmsnorm", ["x", "residual", "weight"], |gpu, [x, residual, weight]| {
        fused_add_rmsnorm(gpu, view_mut(x, &ROWS), view_mut(residual, &ROWS), view(weight, &[16]), 1e-6)
    });
    judge!("norm.rmsnorm", ["x", "out", "weight", "scale"], |gpu, [x, out, weight, scale]| {
        let (x, weight, scale) = (view(x, &ROWS), view(weight, &[16]).into(), Some(view(scale, &[1])));
        let out = eight_bits(out, &ROWS)?;
        RmsNorm { x: Some(x), residual: None, weight, eps: 1e-6, scale, out }.run(gpu)
    });
    judge!(
        "norm.layer_norm",
        ["x", "weight", "bias", "scale", "out"],
        |gpu, [x, weight, bias, scale, out]| {
            let (x, weight, bias) = (view(x, &ROWS), view(weight, &[16]).into(), view(bias, &[16]));
            let (scale, out) = (Some(view(scale, &[1])), eight_bits(out, &ROWS)?);
            LayerNorm { x, weight, bias, eps: 1e-6, scale, out }.run(gpu)
        }
    );
    judge!("activation.silu_and_mul", ["x", "out"], |gpu, [x, out]| {
        silu_and_mul(gpu, view(x, &[2, 32]), view_mut(out, &ROWS))
    });
}

#[test]
fn products_and_rows() {
    judge!("gemm.linear", ["x", "weight", "bias", "out"], |gpu, [x, weight, bias, out]| {
        let (x, weight, bias) = (view(x, &ROWS), view(weight, &[16, 16]), view(bias, &[16]));
        linear(gpu, x, weight, Some(bias), view_mut(out, &ROWS))
    });
    judge!("gemm.segment_gemm", ["x", "weights", "out"], |gpu, [x, weights, out]| {
        let (x, weights) = (view(x, &ROWS), view(weights, &[1, 16, 16]));
        SegmentGemm { x, weights, indptr: &[0, 2], ids: None, out: view_mut(out, &ROWS) }.run(gpu)
    });
    judge!("gather.gather_rows", ["table", "ids", "out"], |gpu, [table, ids, out]| {
        gather_rows(gpu, view(table, &[4, 16]), ids.indices(0, 2)?, view_mut(out, &ROWS))
    });
}

#[test]
fn rotary_embedding() {
    let rope = Rope::new(16, 10_000.0).expect("it is sound");
    let table = CosSinCache::new(&rope, 8).expect("a small table");
    let heads = [2, 1, 16];
    judge!("rope.apply", ["positions", "q", "k"], |gpu, [at, q, k]| {
        let at = Positions::Indices(at.indices(0, 2)?);
        apply_rope(gpu, view_mut(q, &heads), view_mut(k, &heads), at, &rope)
    });
    let names = ["q", "k", "q_out", "k_out", "q_rest", "k_rest", "q_rest_out", "k_rest_out", "positions"];
    judge!("rope.rotate", names, |gpu, [q, k, q_out, k_out, q_rest, k_rest, q_rest_out, k_rest_out, at]| {
        let from = [view(q_rest, &heads), view(k_rest, &heads)];
        RopeRotation {
            from: Some([view(q, &heads), view(k, &heads)]),
            q: eight_bits(q_out, &heads)?,
            k: eight_bits(k_out, &heads)?,
            rest: Some(RopeRest {
                from,
                q: eight_bits(q_rest_out, &heads)?,
                k: eight_bits(k_rest_out, &heads)?,
            }),
            scales: Some([1.0, 2.0]),
            positions: at.indices(0, 2)?,
            angles: RopeAngles::Computed(&rope),
        }
        .run(gpu)
    });
    judge!("rope.apply_with_cos_sin_cache", ["positions", "q", "k"], |gpu, [at, q, k]| {
        let at = Positions::Indices(at.indices(0, 2)?);
        apply_rope_with_cos_sin_cache(gpu, view_mut(q, &heads), view_mut(k, &heads), at, &table)
    });
}

#[test]
fn copies_and_bits() {
    judge!("tensor.copy", ["from", "to"], |gpu, [from, to]| copy(
        gpu,
        view(from, &ROWS),
        view_mut(to, &ROWS)
    ));
    judge!("kv.copy_pages", ["pages"], |gpu, [pages]| {
        copy_pages(gpu, view_mut(pages, &[3, 2, 1, 16]), &[(0, 2)])
    });
    judge!("attention.segment_packbits", ["flags"], |gpu, [flags]| {
        packbits_on_device(gpu, flags, BitOrder::Little).map(drop)
    });
    let [here, there] = simulated();
    let mut indices = IndexBuffer::on_device(zeros(&there));
    let text = here.write_indices(&[1], &mut indices).expect_err("another device").to_string();
    assert_eq!(text, "tensor.write_indices: to is in the memory of device 1, expected device 0");
    let buffer = Buffer::on_device(Dtype::F32, zeros(&there));
    let mut host = [0.0_f32; 32];
    let to = ViewMut::new(&mut host[..], &ROWS).expect("a view");
    let text = copy(&here, buffer.view(&ROWS).expect("it fits"), to).expect_err("another device").to_string();
    assert_eq!(text, "tensor.copy: from is in the memory of device 1, expected device 0");
}
