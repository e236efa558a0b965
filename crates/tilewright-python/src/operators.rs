//! The operators around attention: norms, activations, merges, linear layers and packed bits.

use crate::{
    AnyBackend, Flags, Integers, Named, Queue, TensorArg, check_distinct, check_separate, fields_of_tuple,
    invalid, operator_functions, overlap::interleaved, raised, spans_overlap,
};
use pyo3::{prelude::*, types::PyBytes};
use tilewright::{
    Dtype, Error, Operator, Result, View,
    activation::{Activation, act_and_mul},
    attention::{self, BitOrder, StateMerge},
    gemm::{SegmentGemm, linear},
    norm::{LayerNorm, NormWeight, RmsNorm},
    tensor::{Buffer, copy},
};

const PACKBITS: &str = "attention.segment_packbits";
const ACTIVATION: &str = "activation.act_and_mul";

/// An input on the host that may share memory with an output, of which it is then a copy.
pub(crate) struct InputArg<'a> {
    tensor: &'a TensorArg,
    copy: Option<Buffer>,
}

impl<'a> InputArg<'a> {
    /// Copies `input` if its elements are between those of `out`; an error if both share elements.
    pub(crate) fn beside(operator: &'static str, input: Named<'a>, out: Named<'_>) -> Result<Self> {
        check_distinct(operator, out, input)?;
        let (name, input, mut copy) = (input.name, input.tensor, None);
        if spans_overlap(input, out.tensor) && interleaved(input, out.tensor) {
            let view = input.view(operator, name)?;
            let mut buffer = Buffer::on_host(view.dtype(), input.len())?;
            buffer.view_mut(&[input.len()])?.into_data().into_bytes().copy_from_slice(&input.compact());
            copy = Some(buffer);
        }
        Ok(Self { tensor: input, copy })
    }

    /// [`InputArg::beside`] of an optional argument with its name.
    fn optional_beside(
        operator: &'static str,
        name: &'a str,
        input: Option<&'a TensorArg>,
        out: Named<'_>,
    ) -> Result<Option<Self>> {
        input.map(|input| Self::beside(operator, input.named(name), out)).transpose()
    }

    pub(crate) fn view(&self, operator: &'static str, name: &str) -> Result<View<'_>> {
        match &self.copy {
            Some(copy) => copy.view(self.tensor.shape()),
            None => self.tensor.view(operator, name),
        }
    }
}

/// A norm; in place `x` is `None` or equal to `out`. With a bias it is a layer norm, which has no residual and is not in place.
pub(crate) struct NormFields {
    pub(crate) x: Option<TensorArg>,
    pub(crate) residual: Option<TensorArg>,
    pub(crate) weight: TensorArg,
    pub(crate) bias: Option<TensorArg>,
    pub(crate) eps: f32,
    pub(crate) gemma: bool,
    pub(crate) scale: Option<TensorArg>,
    pub(crate) out: TensorArg,
}

fields_of_tuple!(NormFields { x, residual, weight, bias, eps, gemma, scale, out });

impl NormFields {
    pub(crate) fn run(&mut self, backend: &AnyBackend) -> Result<()> {
        let Self { x, residual, weight, bias, eps, gemma, scale, out } = self;
        let (eps, x) = (*eps, x.as_ref());
        let operator = if bias.is_some() { "norm.layer_norm" } else { "norm.rmsnorm" };
        let x = x.filter(|x| bias.is_some() || !x.is_same(out));
        if let Some(residual) = residual {
            let inputs = [x, scale.as_ref(), Some(&*weight), Some(&*out)];
            let named = ["x", "scale", "weight", "x"].into_iter().zip(inputs);
            named
                .flat_map(|(name, input)| Some(input?.named(name)))
                .try_for_each(|input| check_separate(operator, residual.named("residual"), input))?;
        }
        let weight = InputArg::beside(operator, weight.named("weight"), out.named("out"))?;
        let x = InputArg::optional_beside(operator, "x", x, out.named("out"))?;
        let bias = InputArg::optional_beside(operator, "bias", bias.as_ref(), out.named("out"))?;
        let scale = InputArg::optional_beside(operator, "scale", scale.as_ref(), out.named("out"))?;
        let weight = weight.view(operator, "weight")?;
        let weight = if *gemma { NormWeight::gemma(weight) } else { NormWeight::new(weight) };
        let x = x.as_ref().map(|x| x.view(operator, "x")).transpose()?;
        let bias = bias.as_ref().map(|bias| bias.view(operator, "bias")).transpose()?;
        let scale = scale.as_ref().map(|scale| scale.view(operator, "scale")).transpose()?;
        let residual = residual.as_mut().map(|residual| residual.view_mut(operator, "residual"));
        let (residual, out) = (residual.transpose()?, out.view_mut(operator, "out")?);
        match (x, bias) {
            (Some(x), Some(bias)) => LayerNorm { x, weight, bias, eps, scale, out }.run(backend),
            (None, Some(_)) => Err(Error::new(operator, "x = None, expected a tensor")),
            (x, None) => RmsNorm { x, residual, weight, eps, scale, out }.run(backend),
        }
    }
}

/// RMSNorm, optionally of the sum with a residual, or layer norm.
#[pyfunction]
pub(crate) fn norm(py: Python<'_>, queue: &Queue, mut fields: NormFields) -> PyResult<()> {
    py.detach(|| fields.run(&queue.backend)).map_err(raised)
}

/// `out = act(x[.., ..d]) * x[.., d..]`
#[pyfunction]
pub(crate) fn gated_activation(
    py: Python<'_>,
    queue: &Queue,
    activation: &str,
    x: TensorArg,
    mut out: TensorArg,
) -> PyResult<()> {
    let activation = match activation {
        "silu" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "gelu_tanh" => Activation::GeluTanh,
        other => {
            let text = format!("activation = {other:?}, expected \"silu\", \"gelu\" or \"gelu_tanh\"");
            return Err(invalid(ACTIVATION, text));
        }
    };
    py.detach(|| activate(&queue.backend, activation, &x, &mut out)).map_err(raised)
}

/// `out = act(x[.., ..d]) * x[.., d..]`
pub(crate) fn activate(
    backend: &AnyBackend,
    activation: Activation,
    x: &TensorArg,
    out: &mut TensorArg,
) -> Result<()> {
    let x = InputArg::beside(ACTIVATION, x.named("x"), out.named("out"))?;
    act_and_mul(backend, activation, x.view(ACTIVATION, "x")?, out.view_mut(ACTIVATION, "out")?)
}

/// States to merge: many per row, or one more in place, of the rows whose flag is not 0 if there is a mask.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct MergeFields {
    pub(crate) o: TensorArg,
    pub(crate) lse: TensorArg,
    pub(crate) out: TensorArg,
    pub(crate) out_lse: TensorArg,
    pub(crate) in_place: bool,
    pub(crate) mask: Option<TensorArg>,
}

operator_functions! {
    /// Merges attention states.
    merge_states(MergeFields);
    /// `out = x · weightᵀ + bias`
    linear_layer(LinearFields);
    /// `out = x · weights[ids[s]]ᵀ` for the rows of segment `s`.
    segment_gemm(SegmentFields);
}

impl MergeFields {
    pub(crate) fn run(self, backend: &AnyBackend) -> Result<()> {
        const OPERATOR: &str = "attention.merge_states";
        let Self { o, lse, mut out, mut out_lse, in_place, mask } = self;
        let mask = mask.map(TensorArg::flags);
        let inputs =
            || [o.named("o"), lse.named("lse")].into_iter().chain(mask.iter().map(|mask| mask.named("mask")));
        for out in [out.named("out"), out_lse.named("out_lse")] {
            inputs().try_for_each(|input| check_separate(OPERATOR, out, input))?;
        }
        check_separate(OPERATOR, out.named("out"), out_lse.named("out_lse"))?;
        StateMerge {
            o: o.view(OPERATOR, "o")?,
            lse: lse.view(OPERATOR, "lse")?,
            out: out.view_mut(OPERATOR, "out")?,
            out_lse: out_lse.view_mut(OPERATOR, "out_lse")?,
            in_place,
            mask: mask.as_ref().map(|mask| mask.view(OPERATOR, "mask")).transpose()?,
        }
        .run(backend)
    }
}

/// A linear layer.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct LinearFields {
    x: TensorArg,
    weight: TensorArg,
    bias: Option<TensorArg>,
    out: TensorArg,
}

impl LinearFields {
    fn run(self, backend: &AnyBackend) -> Result<()> {
        const OPERATOR: &str = "gemm.linear";
        let Self { x, weight, bias, mut out } = self;
        let x = InputArg::beside(OPERATOR, x.named("x"), out.named("out"))?;
        let weight = InputArg::beside(OPERATOR, weight.named("weight"), out.named("out"))?;
        let bias = InputArg::optional_beside(OPERATOR, "bias", bias.as_ref(), out.named("out"))?;
        let bias = bias.as_ref().map(|bias| bias.view(OPERATOR, "bias")).transpose()?;
        let (x, weight) = (x.view(OPERATOR, "x")?, weight.view(OPERATOR, "weight")?);
        linear(backend, x, weight, bias, out.view_mut(OPERATOR, "out")?)
    }
}

/// A product with one weight per segment of rows.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct SegmentFields {
    x: TensorArg,
    weights: TensorArg,
    indptr: Integers,
    ids: Option<Integers>,
    out: TensorArg,
}

impl SegmentFields {
    fn run(self, backend: &AnyBackend) -> Result<()> {
        const OPERATOR: &str = "gemm.segment_gemm";
        let Self { x, weights, indptr, ids, mut out } = self;
        let x = InputArg::beside(OPERATOR, x.named("x"), out.named("out"))?;
        let weights = InputArg::beside(OPERATOR, weights.named("weights"), out.named("out"))?;
        let indptr = indptr.to_i32(OPERATOR, "indptr")?;
        let ids = ids.map(|ids| ids.to_i32(OPERATOR, "ids")).transpose()?;
        SegmentGemm {
            x: x.view(OPERATOR, "x")?,
            weights: weights.view(OPERATOR, "weights")?,
            indptr: &indptr,
            ids: ids.as_deref(),
            out: out.view_mut(OPERATOR, "out")?,
        }
        .run(backend)
    }
}

/// Packs flags in device memory into `out`, uint8, from the lowest bit of each byte on.
#[pyfunction]
pub(crate) fn segment_packbits_on_device(
    py: Python<'_>,
    queue: &Queue,
    flags: TensorArg,
    indptr: Integers,
    out: TensorArg,
) -> PyResult<()> {
    let mut out = out.flags();
    py.detach(|| {
        let indptr = indptr.to_i32(PACKBITS, "indptr")?;
        let Some(memory) = flags.device_memory() else {
            return Err(Error::new(PACKBITS, "flags are in host memory, expected a GPU"));
        };
        let (packed, bounds) =
            attention::segment_packbits_on_device(&queue.backend, memory, &indptr, BitOrder::Little)?;
        let bytes = bounds.last().map_or(0, |end| *end as usize);
        copy(&queue.backend, packed.view(Dtype::I8, 0, &[bytes])?, out.view_mut(PACKBITS, "out")?)
    })
    .map_err(raised)
}

/// Packs the flags of each segment into bytes of its own; returns the bytes and their bounds as i32.
#[pyfunction]
pub(crate) fn segment_packbits<'py>(
    py: Python<'py>,
    flags: Flags,
    indptr: Integers,
    order: &str,
) -> PyResult<(Bound<'py, PyBytes>, Vec<i64>)> {
    let order = match order {
        "big" => BitOrder::Big,
        "little" => BitOrder::Little,
        other => {
            let text = format!("bitorder = {other:?}, expected \"big\" or \"little\"");
            return Err(invalid(PACKBITS, text));
        }
    };
    let packed = py.detach(|| attention::segment_packbits(&flags.0, indptr.index(), order));
    let (bytes, bounds) = packed.map_err(raised)?;
    Ok((PyBytes::new(py, &bytes), bounds))
}
