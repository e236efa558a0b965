//! Linear layers with one input, whose outputs are adjacent columns: queries, keys and values; gate and up.

use super::{Tensor, linear::Linear, linear::Weight};
use tilewright::{Backend, Result, View, tensor::Buffer};

/// `N` linear layers of one input.
#[derive(Debug)]
pub(super) enum Projections<const N: usize> {
    /// Each has its weight.
    Apart([Linear; N]),
    /// In device memory: the rows of all weights are one matrix, so that one product computes all outputs.
    Joined(Linear),
}

impl<const N: usize> Projections<N> {
    pub(super) fn linears(&self) -> &[Linear] {
        match self {
            Self::Apart(linears) => linears,
            Self::Joined(linear) => std::slice::from_ref(linear),
        }
    }

    pub(super) fn linears_mut(&mut self) -> &mut [Linear] {
        match self {
            Self::Apart(linears) => linears,
            Self::Joined(linear) => std::slice::from_mut(linear),
        }
    }

    /// Joins weights in device memory, if their dtypes are equal and all or none have a bias.
    pub(super) fn join<B: Backend>(&mut self, backend: &B) -> Result<()> {
        let linears = self.linears();
        let weights: Option<Vec<&Tensor>> = linears.iter().map(|linear| linear.weight.rows()).collect();
        let biases: Vec<&Tensor> = linears.iter().filter_map(|linear| linear.bias.as_ref()).collect();
        let Some(weights) = weights else { return Ok(()) };
        let alike = |of: &[&Tensor]| of.windows(2).all(|pair| pair[0].dtype() == pair[1].dtype());
        if !alike(&weights) || !alike(&biases) || ![0, linears.len()].contains(&biases.len()) {
            return Ok(());
        }
        let weight = Weight::Rows(Tensor::join(&weights, backend)?);
        let bias = if biases.is_empty() { None } else { Some(Tensor::join(&biases, backend)?) };
        *self = Self::Joined(Linear { weight, bias });
        Ok(())
    }

    /// Writes the outputs to adjacent columns of `out`, `[rows, the sum of all output features]`.
    pub(super) fn multiply<B: Backend>(&self, backend: &B, x: View<'_>, out: &mut Buffer) -> Result<()> {
        let (rows, linears) = (x.shape()[0], self.linears());
        let width: usize = linears.iter().map(Linear::features).sum();
        let mut column = 0;
        for linear in linears {
            let features = linear.features();
            linear.multiply(backend, x, out.strided_mut(column, &[rows, features], &[width, 1])?)?;
            column += features;
        }
        Ok(())
    }
}
