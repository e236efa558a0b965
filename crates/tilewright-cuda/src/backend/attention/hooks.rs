//! What a variant's hooks have in device memory: tables, which stay there, and buffers, which come for a run.

use crate::{backend::Gpu, machine::Machine};
use tilewright::{Result, attention::variant::ExpressionVariant, tensor::DeviceMemory};
use tilewright_kernels::variant::arguments;
use tilewright_ptx::sim::Arg;

/// The tables of a variant.
#[derive(Debug)]
pub(super) struct Tables(Vec<DeviceMemory>);

/// The buffers of a variant during a run.
#[derive(Debug)]
pub(super) struct Buffers(Vec<DeviceMemory>);

impl Tables {
    pub(super) fn bring<M: Machine>(gpu: &Gpu<M>, variant: &ExpressionVariant) -> Result<Self> {
        let tables = variant.tables().iter().map(|(_, table)| gpu.upload(bytemuck::cast_slice(table)));
        Ok(Self(tables.collect::<Result<_>>()?))
    }
}

impl Buffers {
    pub(super) fn bring<M: Machine>(gpu: &Gpu<M>, variant: &ExpressionVariant) -> Result<Self> {
        let buffers =
            variant.buffers().iter().map(|(_, buffer)| gpu.upload(bytemuck::cast_slice(&buffer.values())));
        Ok(Self(buffers.collect::<Result<_>>()?))
    }

    /// The arguments of the variant's parameters.
    pub(super) fn arguments(&self, tables: &Tables, variant: &ExpressionVariant) -> Vec<Arg> {
        arguments(variant, |at| tables.0[at].address(), |at| self.0[at].address())
    }

    /// Waits for what the hooks have written. A variant without buffers has nothing to wait for.
    pub(super) fn bring_back<M: Machine>(&self, gpu: &Gpu<M>, variant: &ExpressionVariant) -> Result<()> {
        for (memory, (_, buffer)) in self.0.iter().zip(variant.buffers()) {
            let mut values = vec![0.0_f32; buffer.len()];
            gpu.machine().read(memory.address(), bytemuck::cast_slice_mut(&mut values))?;
            buffer.replace(&values);
        }
        Ok(())
    }
}
