//! Linear layers with one input, whose outputs are adjacent columns: queries, keys and values; gate and up.

use super::{
    ModelConfig, Tensor,
    linear::{Linear, Weight},
};
use tilewright::{Backend, Dtype, Result, View, ViewMut, tensor::Buffer};

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

/// Columns of one buffer in device memory, where one product computes them; on the host a buffer each.
#[derive(Debug)]
pub(crate) struct QkvBuffers {
    buffers: Vec<Buffer>,
    /// Columns of queries, keys and values.
    widths: [usize; 3],
    head_dim: usize,
}

impl QkvBuffers {
    /// Buffers for `rows` rows.
    pub(super) fn new<B: Backend>(backend: &B, config: &ModelConfig, rows: usize) -> Result<Self> {
        let head_dim = config.head_dim;
        let heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads];
        let widths = heads.map(|heads| heads * head_dim);
        let per_buffer = if backend.computes_on_host() { widths.to_vec() } else { vec![widths.iter().sum()] };
        let buffers = per_buffer.into_iter().map(|width| backend.allocate(Dtype::F32, rows * width));
        Ok(Self { buffers: buffers.collect::<Result<_>>()?, widths, head_dim })
    }

    /// Projects `x`.
    pub(super) fn project<B: Backend>(
        &mut self,
        projections: &Projections<3>,
        backend: &B,
        x: View<'_>,
    ) -> Result<()> {
        let (rows, [q_width, k_width, v_width]) = (x.shape()[0], self.widths);
        match (&mut self.buffers[..], projections) {
            ([q, k, v], Projections::Apart([of_q, of_k, of_v])) => {
                let outs = [
                    q.view_mut(&[rows, q_width])?,
                    k.view_mut(&[rows, k_width])?,
                    v.view_mut(&[rows, v_width])?,
                ];
                Linear::multiply_all([of_q, of_k, of_v], backend, x, outs)
            }
            (buffers, projections) => projections.multiply(backend, x, &mut buffers[0]),
        }
    }

    /// Queries, keys and values, `[rows, heads, head_dim]` each.
    pub(super) fn split(&mut self, rows: usize) -> Result<[ViewMut<'_>; 3]> {
        let shapes = self.widths.map(|width| [rows, width / self.head_dim, self.head_dim]);
        match &mut self.buffers[..] {
            [q, k, v] => Ok([q.view_mut(&shapes[0])?, k.view_mut(&shapes[1])?, v.view_mut(&shapes[2])?]),
            buffers => buffers[0].columns_mut(shapes),
        }
    }

    /// Queries (0), keys (1) or values (2) in rows of `width` elements.
    pub(super) fn view_mut(&mut self, part: usize, rows: usize, width: usize) -> Result<ViewMut<'_>> {
        let shape = [rows, self.widths[part] / width, width];
        match self.buffers.len() {
            1 => {
                let (offset, pitch) = (self.widths[..part].iter().sum(), self.widths.iter().sum());
                self.buffers[0].strided_mut(offset, &shape, &[pitch, width, 1])
            }
            _ => self.buffers[part].view_mut(&shape),
        }
    }
}
