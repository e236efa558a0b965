//! Device memory of a variant's hooks: constant tables, tables that a run binds, and buffers for each run.

use crate::{backend::Gpu, machine::Machine};
use tilewright::{Result, attention::variant::ExpressionVariant, tensor::DeviceMemory};
use tilewright_kernels::variant::arguments;
use tilewright_ptx::Arg;

/// The tables of a variant on the device: addresses, and memory of its own where the device has too many constants. Tables that each
/// run binds have address 0.
#[derive(Debug)]
pub(super) struct VariantTables(Vec<(u64, Option<DeviceMemory>)>);

/// The buffers of a variant during a run.
#[derive(Debug)]
pub(super) struct VariantBuffers(Vec<DeviceMemory>);

impl VariantTables {
    pub(super) fn upload<M: Machine>(gpu: &Gpu<M>, variant: &ExpressionVariant) -> Result<Self> {
        let tables =
            variant.tables().iter().enumerate().map(|(at, (_, table))| {
                if variant.is_bound(at) { Ok((0, None)) } else { gpu.constants(table) }
            });
        Ok(Self(tables.collect::<Result<_>>()?))
    }
}

impl VariantBuffers {
    pub(super) fn upload<M: Machine>(gpu: &Gpu<M>, variant: &ExpressionVariant) -> Result<Self> {
        let buffers =
            variant.buffers().iter().map(|(_, buffer)| gpu.upload(bytemuck::cast_slice(&buffer.values())));
        Ok(Self(buffers.collect::<Result<_>>()?))
    }

    /// The kernel arguments of the variant. `bound`: index and address of each table that the run binds.
    pub(super) fn arguments(
        &self,
        tables: &VariantTables,
        bound: &[(usize, u64)],
        variant: &ExpressionVariant,
    ) -> Vec<Arg> {
        let of_run = |at| bound.iter().find(|(table, _)| *table == at).map(|(_, address)| *address);
        arguments(variant, |at| of_run(at).unwrap_or(tables.0[at].0), |at| self.0[at].address())
    }

    /// Copies the buffers back, which waits for the run. A variant without buffers does not wait.
    pub(super) fn download<M: Machine>(&self, gpu: &Gpu<M>, variant: &ExpressionVariant) -> Result<()> {
        for (memory, (_, buffer)) in self.0.iter().zip(variant.buffers()) {
            let mut values = vec![0.0_f32; buffer.len()];
            gpu.machine().read(memory.address(), bytemuck::cast_slice_mut(&mut values))?;
            buffer.replace(&values);
        }
        Ok(())
    }
}
