//! Parameters of an attention kernel, from checked tensors.
//!
//! Strides and addresses are those of the views. Per-head scales are host memory and are uploaded once
//! (`backend/constants.rs`), as are a variant's tables. Buffers that a variant writes are copied to the device and back in each
//! run.

use super::{DevicePlan, OPERATOR};
use crate::{backend::Gpu, machine::Machine};
use tilewright::{
    Mask, Problem, Result, Scale, View, ViewMut, attention::Inputs, kv::KvStrides, tensor::DeviceMemory,
};
use tilewright_kernels::attention::params::{
    AttentionParams, CacheTensor, KvLayout, PeTensors, RowTensor, ScaleTensor, UNLIMITED,
};

/// Memory that must live until the launch is submitted.
pub(super) type TemporaryMemory = Vec<DeviceMemory>;

pub(super) fn row_tensor(address: u64, strides: &[usize]) -> RowTensor {
    RowTensor { address, row: strides[0] as u64, head: strides[1] as u64 }
}

fn cache_tensor(address: u64, strides: KvStrides) -> CacheTensor {
    let KvStrides { page, token, head } = strides;
    CacheTensor { address, page: page as u64, token: token as u64, head: head as u64 }
}

/// Limits of a mask: distance to the left and to the right of a row's position.
fn window(mask: Mask) -> (u32, u32) {
    match mask {
        Mask::Full => (UNLIMITED, UNLIMITED),
        Mask::Causal => (UNLIMITED, 0),
        Mask::Window { left, right } => (left, right.unwrap_or(UNLIMITED)),
    }
}

impl<M: Machine> Gpu<M> {
    /// The kernel parameters of a run; `workspace` is the address of the partial states.
    pub(super) fn attention_params(
        &self,
        (problem, plan): (&Problem, &DevicePlan),
        inputs: &Inputs<'_>,
        (o, lse): (&ViewMut<'_>, Option<&ViewMut<'_>>),
        (workspace, temporaries): (u64, &mut TemporaryMemory),
    ) -> Result<AttentionParams> {
        let (q, q_pe) = inputs.q();
        let row = |name, view: View<'_>| -> Result<RowTensor> {
            Ok(row_tensor(self.address(OPERATOR, name, &view)?, view.strides()))
        };
        let cache = |name, (view, strides): (View<'_>, KvStrides)| -> Result<CacheTensor> {
            let mut tensor = cache_tensor(self.address(OPERATOR, name, &view)?, strides);
            if plan.layout == KvLayout::Blocks {
                tensor.page = u64::from(plan.page_size) * tensor.token;
            }
            Ok(tensor)
        };
        let pe = match (q_pe, inputs.k_pe()) {
            (Some(q), Some(k)) => Some(PeTensors { q: row("q.pe", q)?, k: cache("kpe", k)? }),
            _ => None,
        };
        let (left, right) = window(problem.mask());
        let (heads, dim) = (problem.heads(), problem.head_dim());
        let lse = lse.map(|lse| self.address_mut(OPERATOR, "lse", lse)).transpose()?;
        Ok(AttentionParams {
            q: row("q", q)?,
            k: cache("k", inputs.k())?,
            v: cache("v", inputs.v())?,
            pe,
            o: row_tensor(self.address_mut(OPERATOR, "o", o)?, o.strides()),
            lse: lse.unwrap_or(0),
            partial_o: workspace,
            partial_stats: workspace + 4 * (plan.partial_rows * dim.vo) as u64,
            plan: plan.args,
            qo_heads: heads.qo as u32,
            group: heads.group() as u32,
            page_size: plan.page_size,
            layout: plan.layout,
            left,
            right,
            scale: problem.scale(),
            k_scale: self.scale("k scale", inputs.scales().k, temporaries)?,
            v_scale: self.scale("v scale", inputs.scales().v, temporaries)?,
            variant: Vec::new(),
        })
    }

    fn scale(&self, name: &str, scale: Scale<'_>, temporaries: &mut TemporaryMemory) -> Result<ScaleTensor> {
        Ok(match scale {
            Scale::One => ScaleTensor::default(),
            Scale::Tensor(factor) => ScaleTensor { value: factor, ..ScaleTensor::default() },
            Scale::Head(scales) => {
                let (address, uncached) = self.constants(scales)?;
                temporaries.extend(uncached);
                ScaleTensor { address, page: 0, head: 1, value: 1.0 }
            }
            Scale::Page(scales) => {
                let address = self.address(OPERATOR, name, &scales)?;
                let strides = scales.strides();
                let head = strides.get(1).copied().unwrap_or(0);
                ScaleTensor { address, page: strides[0] as u64, head: head as u64, value: 1.0 }
            }
        })
    }
}
