//! Attention of one request by a plain f32 loop: the error reference that tolerances are derived from.
//!
//! Results of the functions of a [`Definition`] are rounded to f32 after each step. The loop shares no code with the oracle.

use super::attention::{Definition, HeadTransform, LogitIndex, OracleRequest, is_visible};
use crate::{Dtype, Element, View};

/// The rounding of the weights before their product with the values.
#[derive(Clone, Copy)]
pub struct WeightRounding<'a> {
    /// The dtype; with e4m3, logits are summed as [`narrow_sum`] does.
    pub dtype: Dtype,
    /// The value's scale in the cache, by which a weight is multiplied before the rounding and divided after it.
    pub scale: &'a dyn Fn(LogitIndex) -> f64,
}

impl std::fmt::Debug for WeightRounding<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WeightRounding").field("dtype", &self.dtype).finish_non_exhaustive()
    }
}

/// `o` `[qo_len, num_qo_heads, head_dim_vo]` and the LSE in base 2 `[qo_len, num_qo_heads]`, NaN without softmax.
///
/// # Panics
/// When a shape does not have three axes.
pub fn attention(
    request: &OracleRequest<'_>,
    definition: &Definition<'_>,
    weights: WeightRounding<'_>,
) -> (Vec<f32>, Vec<f32>) {
    let (&[qo_len, qo_heads, _], &[kv_len, kv_heads, _]) = (request.q.shape(), request.k.shape()) else {
        panic!("q {:?} and k {:?} have three axes", request.q, request.k);
    };
    let vo = request.v.shape()[2];
    let tokens =
        || (0..kv_len).flat_map(|j| (0..kv_heads).map(move |g| LogitIndex { i: 0, j, h: 0, g, p: 0 }));
    let of_token = |view, transform| -> Vec<_> {
        tokens().map(|index| transformed(head(view, index.j, index.g), transform, index)).collect()
    };
    let keys: Vec<Vec<f32>> = of_token(&request.k, &definition.key);
    let values: Vec<Vec<f32>> = of_token(&request.v, &definition.value);
    let (mut all_o, mut all_lse) = (Vec::new(), Vec::new());
    for (i, h) in (0..qo_len).flat_map(|i| (0..qo_heads).map(move |h| (i, h))) {
        let p = kv_len as i64 - qo_len as i64 + i as i64;
        let row = LogitIndex { i, j: 0, h, g: h / (qo_heads / kv_heads), p };
        let q = transformed(head(&request.q, i, h), &definition.query, row);
        let is_unmasked =
            |index: &LogitIndex| is_visible(request.mask, p, index.j) && (definition.visible)(*index);
        let visible: Vec<LogitIndex> =
            (0..kv_len).map(|j| LogitIndex { j, ..row }).filter(is_unmasked).collect();
        let logit = |index: &LogitIndex| {
            let products = q.iter().zip(&keys[index.j * kv_heads + index.g]).map(|(q, k)| q * k);
            let dot = if weights.dtype == Dtype::E4m3 { narrow_sum(products) } else { products.sum::<f32>() };
            (definition.logit)(*index, f64::from(dot * request.scale as f32)) as f32
        };
        let logits: Vec<f32> = visible.iter().map(logit).collect();
        let sink = definition.sink.as_ref().map(|sink| sink(h) as f32);
        let max = logits.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| if definition.softmax { (logit - max).exp() } else { logit };
        let (mut o, mut sum) = (vec![0.0; vo], sink.map_or(0.0, weight));
        for (index, logit) in visible.iter().zip(&logits) {
            let weight = weight(*logit);
            sum += weight;
            let scale = (weights.scale)(*index) as f32;
            let rounded = round(weights.dtype, weight * scale) / scale;
            let v = &values[index.j * kv_heads + index.g];
            o.iter_mut().zip(v).for_each(|(o, v)| *o += rounded * v);
        }
        if definition.softmax {
            o.iter_mut().for_each(|o| *o = if sum == 0.0 { 0.0 } else { *o / sum });
        }
        all_o.extend(transformed(o, &definition.output, row));
        let lse = (max + sum.ln()) / std::f32::consts::LN_2;
        all_lse.push(if definition.softmax { lse } else { f32::NAN });
    }
    (all_o, all_lse)
}

/// The sum of products of 8-bit floats as tensor cores compute it, 32 at a time: products and the sum so far are truncated to
/// multiples of 2^-13 of the largest one's power of two, as on an H100.
pub fn narrow_sum(products: impl Iterator<Item = f32>) -> f32 {
    let products: Vec<f32> = products.collect();
    products.chunks(32).fold(0.0, |sum, products| {
        let addends = || products.iter().copied().chain([sum]);
        let largest = addends().fold(0.0_f32, |max, addend| max.max(addend.abs()));
        if largest == 0.0 || !addends().all(f32::is_finite) {
            return addends().sum();
        }
        let unit = 2.0_f32.powi(largest.log2().floor() as i32 - 13);
        addends().map(|addend| (addend / unit).trunc() * unit).sum()
    })
}

/// The elements `[row, head]` of a tensor with three axes.
fn head(view: &View<'_>, row: usize, head: usize) -> Vec<f32> {
    (0..view.shape()[2]).map(|d| view.at(&[row, head, d])).collect()
}

/// A head after `transform`, rounded to f32.
fn transformed(head: Vec<f32>, transform: &HeadTransform<'_>, index: LogitIndex) -> Vec<f32> {
    let mut head: Vec<f64> = head.into_iter().map(f64::from).collect();
    transform(index, &mut head);
    head.into_iter().map(|x| x as f32).collect()
}

/// A number rounded to a dtype.
pub fn round(dtype: Dtype, value: f32) -> f32 {
    crate::with_dtype!(dtype, T => T::from_f32(value).to_f32())
}
