//! A linear layer of the model: its weight as the backend multiplies it, and its bias.

use super::{Tensor, projections::Projections};
use tilewright::{
    Backend, Operator, Result, View, ViewMut,
    activation::{self, Activation},
    gemm::{self, GatedLinear, PackedLinear, PackedMatrix, PackedProduct, PackedWeight, WeightFormat},
};

/// `y = x · weightᵀ + bias`
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: Weight,
    pub(super) bias: Option<Tensor>,
}

/// A weight matrix `[out_features, in_features]`.
#[derive(Debug)]
pub(super) enum Weight {
    /// Row-major, in the map of the file or in device memory.
    Rows(Tensor),
    /// In panels, in the memory of the process.
    Packed(PackedMatrix),
}

impl Weight {
    /// The row-major tensor, if it is one.
    pub(super) fn rows(&self) -> Option<&Tensor> {
        if let Self::Rows(weight) = self { Some(weight) } else { None }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Rows(weight) => weight.bytes(),
            Self::Packed(weight) => weight.bytes(),
        }
    }

    pub(super) fn elements(&self) -> usize {
        match self {
            Self::Rows(weight) => weight.shape().iter().product(),
            Self::Packed(weight) => weight.shape().iter().product(),
        }
    }

    /// Packs a row-major weight, by default without rounding, if `backend` multiplies packed weights.
    pub(super) fn pack<B: Backend>(&mut self, backend: &B, format: Option<WeightFormat>) -> Result<()> {
        if let Self::Rows(weight) = self {
            let format = format.unwrap_or(WeightFormat::Float(weight.dtype()));
            if let Some(packed) = gemm::pack(backend, weight.view(), format)? {
                *self = Self::Packed(packed);
            }
        }
        Ok(())
    }
}

impl Linear {
    /// Its packed weight; `None` if it is row-major.
    fn packed(&self) -> Option<PackedWeight<'_>> {
        let Weight::Packed(matrix) = &self.weight else { return None };
        Some(PackedWeight { matrix, bias: self.bias.as_ref().map(Tensor::view) })
    }

    pub(super) fn multiply<B: Backend>(&self, backend: &B, x: View<'_>, out: ViewMut<'_>) -> Result<()> {
        match &self.weight {
            Weight::Rows(weight) => {
                gemm::linear(backend, x, weight.view(), self.bias.as_ref().map(Tensor::view), out)
            }
            Weight::Packed(_) => Self::multiply_all([self], backend, x, [out]),
        }
    }

    /// Multiplies `x` with several weights, in one pass if all are packed.
    pub(super) fn multiply_all<B: Backend, const N: usize>(
        linears: [&Self; N],
        backend: &B,
        x: View<'_>,
        outs: [ViewMut<'_>; N],
    ) -> Result<()> {
        let packed: Option<Vec<_>> = linears.iter().map(|linear| linear.packed()).collect();
        if let Some(weights) = packed {
            let products = weights.into_iter().zip(outs).map(|(weight, out)| PackedProduct { weight, out });
            return PackedLinear { x, products: products.collect() }.run(backend);
        }
        linears.into_iter().zip(outs).try_for_each(|(linear, out)| linear.multiply(backend, x, out))
    }

    /// The number of output features.
    pub(super) fn features(&self) -> usize {
        match &self.weight {
            Weight::Rows(weight) => weight.shape()[0],
            Weight::Packed(weight) => weight.shape()[0],
        }
    }

    /// The tensors that a device backend uploads.
    pub(super) fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let weight = if let Weight::Rows(weight) = &mut self.weight { Some(weight) } else { None };
        weight.into_iter().chain(&mut self.bias)
    }

    /// Bytes of weight and bias.
    pub(super) fn bytes(&self) -> usize {
        self.weight.bytes() + self.bias.as_ref().map_or(0, Tensor::bytes)
    }
}

/// The buffers of a gated projection: f32 `[rows, 2 * inner]` for separate products, and the result `[rows, inner]`.
pub(super) struct GatedBuffers<'a> {
    pub(super) gate_up: &'a mut tilewright::tensor::Buffer,
    pub(super) activated: ViewMut<'a>,
}

/// `activated ← activation(x · gateᵀ) * (x · upᵀ)`, in one pass if both weights are packed.
pub(super) fn multiply_gated<B: Backend>(
    gate_up: &Projections<2>,
    backend: &B,
    activation: Activation,
    x: View<'_>,
    to: GatedBuffers<'_>,
) -> Result<()> {
    if let Projections::Apart([gate, up]) = gate_up
        && let (Some(gate), Some(up)) = (gate.packed(), up.packed())
    {
        return GatedLinear { x, gate, up, activation, out: to.activated }.run(backend);
    }
    let (rows, inner) = (x.shape()[0], to.activated.shape()[1]);
    gate_up.multiply(backend, x, to.gate_up)?;
    activation::act_and_mul(backend, activation, to.gate_up.view(&[rows, 2 * inner])?, to.activated)
}
