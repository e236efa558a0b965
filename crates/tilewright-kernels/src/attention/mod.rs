//! Attention kernels.

pub mod body;
pub mod choose;
pub mod divisor;
pub mod items;
pub mod kernel;
pub mod operator;
pub mod params;
pub mod plan_device;

pub use choose::{Alignment, Body, ChoiceInput, KernelConfig};
pub(crate) use items::{KnownRequest, RequestTable, WorkItemRegs};
pub use items::{MergeItem, MergeSource, NONE, RequestRows, WorkItem};
pub(crate) use params::{AttentionParamRegs, CacheTensorRegs, RowTensorRegs};
pub use params::{
    AttentionParams, CacheTensor, KvLayout, PeTensors, PlanArrays, RowTensor, ScaleTensor, UNLIMITED, Wait,
};
