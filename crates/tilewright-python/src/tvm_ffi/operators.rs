//! Norms, activations, rotations, merges, appends and packed bits: their arguments in the form of the Python extension's operators.

use super::abi::{Arguments, Failure, Outcome, backend_of};
use crate::{
    Flags, IndexArg, Integers, RopeFields, SlotFields, TensorArg, TensorDtype,
    cache::{AppendFields, MlaAppendFields},
    check_separate,
    operators::{MergeFields, NormFields, activate},
    rope::{Rotation, style},
};
use tilewright::{
    Dtype, Error, ErrorKind, KvLayout, Result,
    activation::Activation,
    attention::{self, BitOrder},
    rope::{CosSinCache, RopeAngles},
    tensor::copy,
};

/// A norm of `x` with `weight` that writes `out`, without other options.
fn norm(x: TensorArg, weight: TensorArg, out: TensorArg, eps: f64) -> NormFields {
    NormFields {
        x: Some(x),
        residual: None,
        weight,
        bias: None,
        eps: eps as f32,
        gemma: false,
        scale: None,
        out,
    }
}

pub(super) fn rmsnorm(call: &Arguments<'_>, gemma: bool) -> Outcome {
    let (out, x, weight) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?);
    let (eps, (_, backend)) = (call.float(3)?, backend_of(&out)?);
    call.int(4)?; // a hint
    NormFields { gemma, ..norm(x, weight, out, eps) }.run(&backend)?;
    Ok(None)
}

pub(super) fn fused_add_rmsnorm(call: &Arguments<'_>, gemma: bool) -> Outcome {
    let (out, residual, weight) = (call.tensor(0)?, Some(call.tensor(1)?), call.tensor(2)?);
    let (eps, (_, backend)) = (call.float(3)?, backend_of(&out)?);
    call.int(4)?; // a hint
    NormFields { residual, gemma, ..norm(call.tensor(0)?, weight, out, eps) }.run(&backend)?;
    Ok(None)
}

pub(super) fn layernorm(call: &Arguments<'_>) -> Outcome {
    let (out, x, weight) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?);
    let (bias, eps, (_, backend)) = (Some(call.tensor(3)?), call.float(4)?, backend_of(&out)?);
    NormFields { bias, ..norm(x, weight, out, eps) }.run(&backend)?;
    Ok(None)
}

pub(super) fn activation(call: &Arguments<'_>, activation: Activation) -> Outcome {
    let (mut out, x) = (call.tensor(0)?, call.tensor(1)?);
    call.int(2)?; // a hint
    let (_, backend) = backend_of(&out)?;
    activate(&backend, activation, &x, &mut out)?;
    Ok(None)
}

/// `q, k, q_rope, k_rope`; in place if the outputs are the inputs.
struct RotationTensors {
    from: [TensorArg; 2],
    to: [TensorArg; 2],
}

impl RotationTensors {
    fn read(call: &Arguments<'_>) -> Result<Self, Failure> {
        Ok(Self { from: [call.tensor(0)?, call.tensor(1)?], to: [call.tensor(2)?, call.tensor(3)?] })
    }

    fn rotate(self, positions: &IndexArg, angles: RopeAngles<'_>) -> Outcome {
        let Self { from, to: [mut q, mut k] } = self;
        let is_in_place = [(&from[0], &q), (&from[1], &k)].map(|(from, to)| from.is_same(to));
        let from = match is_in_place {
            [true, true] => [None, None],
            [false, false] => from.each_ref().map(Some),
            _ => {
                let text = "one of q_rope and k_rope is in place, expected both or none";
                return Err(Error::new("tvm_ffi.apply_rope_pos_ids", text).into());
            }
        };
        let (_, backend) = backend_of(&q)?;
        let mut copied = Vec::new();
        let indices = positions.indices("tvm_ffi.apply_rope_pos_ids", "pos_ids", &mut copied)?;
        Rotation { from, indices, angles }.apply(&backend, &mut q, &mut k)?;
        Ok(None)
    }
}

/// `q, k, q_rope, k_rope, pos_ids, rotary_dim, interleave, rope_scale, rope_theta`
fn rotate(call: &Arguments<'_>, scaling: (&str, Vec<f64>)) -> Outcome {
    let (tensors, positions) = (RotationTensors::read(call)?, IndexArg::of(call.tensor(4)?)?);
    let rotary_dim = usize::try_from(call.int(5)?).unwrap_or(0); // 0 is refused
    let (interleaved, theta) = (call.int(6)? != 0, call.float(8)?);
    let scaling = Some((scaling.0.to_owned(), scaling.1));
    let rope = RopeFields { rotary_dim, theta, interleaved, scaling }.rope()?;
    tensors.rotate(&positions, RopeAngles::Computed(&rope))
}

pub(super) fn apply_rope_pos_ids(call: &Arguments<'_>) -> Outcome {
    rotate(call, ("linear", vec![call.float(7)?]))
}

pub(super) fn apply_llama31_rope_pos_ids(call: &Arguments<'_>) -> Outcome {
    rotate(call, ("llama31", vec![call.float(7)?, call.float(9)?, call.float(10)?, call.float(11)?]))
}

pub(super) fn apply_rope_pos_ids_cos_sin_cache(call: &Arguments<'_>) -> Outcome {
    let (tensors, table) = (RotationTensors::read(call)?, call.tensor(4)?);
    let (positions, style) = (IndexArg::of(call.tensor(5)?)?, style(call.int(6)? != 0));
    let IndexArg::Host(positions) = positions else {
        let text = "pos_ids is on a device, expected host memory";
        return Err(Error::new(call.operator, text).with_kind(ErrorKind::Unsupported).into());
    };
    // only the rows of these positions are copied: a table has up to 10^8 elements, and its changes are unknown
    let rows = table_rows(call.operator, &table, &positions.to_i64())?;
    let cache = CosSinCache::from_table(rows, table.shape()[1], style)?;
    let tokens = IndexArg::Host(Integers::I64((0..positions.index().len() as i64).collect()));
    tensors.rotate(&tokens, RopeAngles::Table(&cache))
}

/// The rows of a table float32 `[max_positions, rotary_dim]` on the host.
fn table_rows(operator: &'static str, table: &TensorArg, positions: &[i64]) -> Result<Vec<f32>> {
    let &[max, dim] = table.shape() else {
        let text =
            format!("cos_sin_cache has shape {:?}, expected [max_positions, rotary_dim]", table.shape());
        return Err(Error::new(operator, text));
    };
    let view = table.view(operator, "cos_sin_cache")?;
    if view.dtype() != Dtype::F32 || !table.on_host() {
        return Err(Error::new(operator, format!("cos_sin_cache is {view:?}, expected f32 on the host")));
    }
    let mut rows = Vec::with_capacity(positions.len() * dim);
    for (token, &position) in positions.iter().enumerate() {
        let row = usize::try_from(position).ok().filter(|&row| row < max).ok_or_else(|| {
            let text = format!("token {token}: position = {position}, expected below max_positions = {max}");
            Error::new(operator, text)
        })?;
        rows.extend((0..dim).map(|at| view.at(&[row, at])));
    }
    Ok(rows)
}

pub(super) fn merge_state(call: &Arguments<'_>) -> Outcome {
    let (a, b, out) = (
        [call.tensor(0)?, call.tensor(1)?],
        [call.tensor(2)?, call.tensor(3)?],
        [call.tensor(4)?, call.tensor(5)?],
    );
    let (_, backend) = backend_of(&out[0])?;
    let ([o, lse], [mut out, mut out_lse]) = (b, out);
    for (from, to, names) in
        [(&a[0], &mut out, ["v_a", "v_merged"]), (&a[1], &mut out_lse, ["s_a", "s_merged"])]
    {
        if !from.is_same(to) {
            check_separate(call.operator, to.named(names[1]), from.named(names[0]))?;
            copy(&backend, from.view(call.operator, names[0])?, to.view_mut(call.operator, names[1])?)?;
        }
    }
    MergeFields { o, lse, out, out_lse, in_place: true, mask: None }.run(&backend)?;
    Ok(None)
}

pub(super) fn merge_state_in_place(call: &Arguments<'_>) -> Outcome {
    let (out, out_lse, o, lse) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?, call.tensor(3)?);
    let (mask, (_, backend)) = (call.optional(4)?, backend_of(&out)?);
    MergeFields { o, lse, out, out_lse, in_place: true, mask }.run(&backend)?;
    Ok(None)
}

pub(super) fn merge_states(call: &Arguments<'_>) -> Outcome {
    let (o, lse, out, out_lse) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?, call.tensor(3)?);
    let (_, backend) = backend_of(&out)?;
    MergeFields { o, lse, out, out_lse, in_place: false, mask: None }.run(&backend)?;
    Ok(None)
}

/// Packs segments of flags into `y`; returns their bounds.
fn pack(
    operator: &'static str,
    x: &TensorArg,
    indptr: &Integers,
    order: &str,
    y: &mut TensorArg,
) -> Result<Vec<i64>, Failure> {
    let order = match order {
        "big" => BitOrder::Big,
        "little" => BitOrder::Little,
        other => {
            let text = format!("bitorder = {other:?}, expected \"big\" or \"little\"");
            return Err(Error::new(operator, text).into());
        }
    };
    let (bytes, bounds) = attention::segment_packbits(&Flags::of(x)?.0, indptr.index(), order)?;
    y.check_writable(operator, "y")?;
    check_separate(operator, y.named("y"), x.named("x"))?;
    if y.dtype() != TensorDtype::U8 || y.dense_host(operator, "y")?.len() != bytes.len() {
        let text = format!("y is {} of shape {:?}, expected uint8 [{}]", y.dtype(), y.shape(), bytes.len());
        return Err(Error::new(operator, text).into());
    }
    y.bytes_mut().copy_from_slice(&bytes);
    Ok(bounds)
}

pub(super) fn packbits(call: &Arguments<'_>) -> Outcome {
    let (x, order, mut y) = (call.tensor(0)?, call.text(1)?, call.tensor(2)?);
    let bounds = Integers::I64(vec![0, x.len() as i64]);
    pack(call.operator, &x, &bounds, &order, &mut y)?;
    Ok(None)
}

pub(super) fn segment_packbits(call: &Arguments<'_>) -> Outcome {
    let (x, order, mut y) = (call.tensor(0)?, call.text(3)?, call.tensor(4)?);
    let index = |at: usize| -> Result<IndexArg, Failure> { Ok(IndexArg::of(call.tensor(at)?)?) };
    let (input, output) = (index(1)?, index(2)?);
    let bounds = pack(call.operator, &x, input.host(call.operator, "input_indptr")?, &order, &mut y)?;
    let given = output.host(call.operator, "output_indptr")?.to_i64();
    if given != bounds {
        return Err(
            Error::new(call.operator, format!("output_indptr is {given:?}, expected {bounds:?}")).into()
        );
    }
    Ok(None)
}

pub(super) fn kv_layout(call: &Arguments<'_>, at: usize) -> Result<KvLayout, Failure> {
    match call.int(at)? {
        0 => Ok(KvLayout::Nhd),
        1 => Ok(KvLayout::Hnd),
        other => {
            Err(Error::new(call.operator, format!("layout = {other}, expected 0 (NHD) or 1 (HND)")).into())
        }
    }
}

/// Tokens per page of a cache, and its KV heads.
pub(super) fn page_shape(operator: &'static str, cache: &TensorArg, layout: KvLayout) -> Result<[usize; 2]> {
    match (cache.shape(), layout) {
        (&[_, page_size, heads, _], KvLayout::Nhd) | (&[_, heads, page_size, _], KvLayout::Hnd) => {
            Ok([page_size, heads])
        }
        (shape, _) => {
            let text = format!("k_cache has shape {shape:?}, expected four axes");
            Err(Error::new(operator, text))
        }
    }
}

pub(super) fn append_paged_kv_cache(call: &Arguments<'_>) -> Outcome {
    let layout = kv_layout(call, 9)?;
    let (k, v, k_cache, v_cache) = (call.tensor(0)?, call.tensor(1)?, call.tensor(4)?, call.tensor(5)?);
    let [page_size, _] = page_shape(call.operator, &k_cache, layout)?;
    let (slots, (_, backend)) = (slots(call, [2, 3, 6, 7, 8], page_size)?, backend_of(&k_cache)?);
    let layout = if layout == KvLayout::Nhd { "NHD" } else { "HND" }.to_owned();
    AppendFields { k, v, k_cache, v_cache, slots, layout, k_scale: None, v_scale: None }.run(&backend)?;
    Ok(None)
}

pub(super) fn append_paged_mla_kv_cache(call: &Arguments<'_>) -> Outcome {
    let (ckv, kpe, ckv_cache, kpe_cache) =
        (call.tensor(0)?, call.tensor(1)?, call.tensor(4)?, call.tensor(5)?);
    let &[_, page_size, _] = ckv_cache.shape() else {
        let text = format!("ckv_cache has shape {:?}, expected three axes", ckv_cache.shape());
        return Err(Error::new(call.operator, text).into());
    };
    let (slots, (_, backend)) = (slots(call, [2, 3, 6, 7, 8], page_size)?, backend_of(&ckv_cache)?);
    MlaAppendFields { ckv, kpe, ckv_cache, kpe_cache, slots }.run(&backend)?;
    Ok(None)
}

/// The slots of new tokens from `batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len` at these arguments.
fn slots(call: &Arguments<'_>, at: [usize; 5], page_size: usize) -> Result<SlotFields, Failure> {
    let index =
        |at: usize| -> Result<Option<IndexArg>, Failure> { Ok(Some(IndexArg::of(call.tensor(at)?)?)) };
    let [batch_indices, positions, indices, indptr, last_page_len] = at;
    Ok(SlotFields {
        batch_indices: index(batch_indices)?,
        positions: index(positions)?,
        indptr: index(indptr)?,
        indices: index(indices)?,
        last_page_len: index(last_page_len)?,
        slot_mapping: None,
        page_size,
    })
}
