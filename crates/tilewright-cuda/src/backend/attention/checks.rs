//! Page indices in device memory, checked against the cache of a run in the checked mode.

use super::{
    OPERATOR,
    device_plan::{DevicePlan, PlanLaunch},
};
use crate::{backend::Gpu, machine::Machine};
use tilewright::{
    Error, Plan, Result,
    attention::{DeviceBatch, DevicePages},
};
use tilewright_kernels::attention::params::KvLayout;

impl<M: Machine> Gpu<M> {
    /// Checks the page indices of a plan that the host has not seen, in the checked mode and outside of a recording. The cache has
    /// `num_pages` pages.
    pub(super) fn check_page_indices(
        &self,
        plan: &Plan,
        device_plan: &DevicePlan,
        num_pages: usize,
    ) -> Result<()> {
        if !self.machine.checks() || device_plan.layout != KvLayout::Paged || self.machine.is_recording()? {
            return Ok(());
        }
        let lists = match &device_plan.launch {
            Some(launch) => self.lists_of_batch(plan, device_plan, launch)?,
            None => {
                let parts = plan.requests().source.device_indices().iter();
                parts.map(|part| (part.first, part.at.len)).collect()
            }
        };
        for (first, len) in lists {
            let indices: Vec<i32> = self.read_array(device_plan.args.indices + 4 * first as u64, len)?;
            let is_page = |index: &i32| usize::try_from(*index).is_ok_and(|index| index < num_pages);
            if let Some(at) = indices.iter().position(|index| !is_page(index)) {
                let (at, page) = (first + at, indices[at]);
                let text = format!(
                    "page indices: entry {at} = {page} is not in 0..{num_pages}, the pages of the cache"
                );
                return Err(Error::new(OPERATOR, text));
            }
        }
        Ok(())
    }

    /// First entry and length of the used lists of page indices; none if the kernel has rejected the lengths.
    fn lists_of_batch(
        &self,
        plan: &Plan,
        device_plan: &DevicePlan,
        PlanLaunch { batch, .. }: &PlanLaunch,
    ) -> Result<Vec<(usize, usize)>> {
        let DeviceBatch { num_requests, pages, .. } = batch;
        let most = plan.capacity().map_or(0, |capacity| capacity.requests);
        let requests = usize::try_from(self.read_numbers(num_requests, 1)?[0]).unwrap_or(usize::MAX);
        if requests > most {
            return Ok(Vec::new());
        }
        let sizes = plan.array_sizes();
        match pages {
            DevicePages::Lists { kv_indptr, .. } => {
                let bounds = self.read_numbers(kv_indptr, requests + 1)?;
                let [first, end] = [bounds[0], bounds[requests]].map(|bound| usize::try_from(bound).ok());
                let list = first.zip(end).filter(|(first, end)| first <= end && *end <= sizes.pages);
                Ok(list.map(|(first, end)| (first, end - first)).into_iter().collect())
            }
            DevicePages::BlockTable { seq_lens, columns, .. } => {
                let lens = self.read_numbers(seq_lens, requests)?.into_iter().enumerate();
                let used = |len: i32| len.max(0).unsigned_abs().div_ceil(device_plan.page_size) as usize;
                Ok(lens.map(|(row, len)| (row * columns, used(len).min(*columns))).collect())
            }
        }
    }
}
