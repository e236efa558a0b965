//! CUDA graphs: captured work that is launched as a whole.
//!
//! A graph retains the machine code of its kernels and the bytes of its writes. The caller must keep the device memory alive that
//! it addresses.

use super::{Context, DriverError, Handle, Result, Stream, error::driver, handle::lock};
use cudarc::driver::sys;
use std::{ptr::null_mut, sync::Mutex};

/// Captured work.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    handle: Handle<sys::CUgraph_st>,
    nodes: usize,
}

/// An instantiated graph, which can be launched any number of times.
#[derive(Debug)]
pub struct Executable {
    /// Locked, because graphs "are not internally synchronized" (CUDA driver API).
    handle: Mutex<Handle<sys::CUgraphExec_st>>,
    graph: Graph,
}

impl Graph {
    /// Takes ownership of a captured graph. The context is current.
    pub(super) fn new(context: &Context, graph: sys::CUgraph) -> Result<Self> {
        // owned from here on, so that an early return destroys it
        let mut graph = Self { context: context.clone(), handle: Handle(graph), nodes: 0 };
        // SAFETY: the graph exists; with a null array the driver writes only the number of nodes.
        unsafe { driver!(cuGraphGetNodes(graph.handle.0, null_mut(), &mut graph.nodes)) }?;
        Ok(graph)
    }

    /// Number of nodes: launches, copies, fills.
    pub fn num_nodes(&self) -> usize {
        self.nodes
    }

    /// Instantiates the graph for launches.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn instantiate(self) -> Result<Executable> {
        let mut handle = null_mut();
        {
            let _current = self.context.enter()?;
            // SAFETY: the graph exists.
            unsafe { driver!(cuGraphInstantiateWithFlags(&mut handle, self.handle.0, 0)) }?;
        }
        Ok(Executable { handle: Mutex::new(Handle(handle)), graph: self })
    }
}

impl Executable {
    /// Launches the graph in stream order.
    ///
    /// # Errors
    /// If the stream belongs to another GPU; if the driver fails.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        stream.same_gpu("graph.launch", "the graph", &self.graph.context)?;
        let _current = self.graph.context.enter()?;
        let handle = lock(&self.handle);
        // SAFETY: graph and stream exist, and the lock excludes other threads from the graph.
        unsafe { driver!(cuGraphLaunch(handle.0, stream.raw())) }
    }

    /// Replaces the graph by `newer`, which has the same topology with other arguments, grids or addresses. Cheaper than
    /// [`Graph::instantiate`]. Launches in flight are not affected.
    ///
    /// # Errors
    /// If the topology differs; this graph is unchanged then.
    pub fn update(&mut self, newer: Graph) -> Result<()> {
        if !newer.context.is(&self.graph.context) {
            return Err(DriverError::new("graph.update", "the newer graph belongs to another GPU"));
        }
        {
            let _current = self.graph.context.enter()?;
            let handle = lock(&self.handle);
            let mut info = sys::CUgraphExecUpdateResultInfo {
                result: sys::CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS,
                errorNode: null_mut(),
                errorFromNode: null_mut(),
            };
            // SAFETY: both graphs exist, and `info` is valid.
            unsafe { driver!(cuGraphExecUpdate_v2(handle.0, newer.handle.0, &mut info)) }.map_err(
                |error| {
                    let why = format!(
                        " ({:?}; it has {} nodes, the newer one {})",
                        info.result, self.graph.nodes, newer.nodes
                    );
                    let kind = error.kind();
                    error.within("graph.update").with(kind, &why)
                },
            )?;
        }
        self.graph = newer;
        Ok(())
    }

    /// Number of nodes.
    pub fn num_nodes(&self) -> usize {
        self.graph.nodes
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: owned by this value and destroyed once. Errors are ignored: `Drop` cannot report them.
            let _ = unsafe { sys::cuGraphDestroy(self.handle.0) };
        }
        self.context.free_deferred();
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if let Ok(_current) = self.graph.context.enter() {
            // SAFETY: owned by this value and destroyed once; launches in flight complete. Errors are ignored: `Drop` cannot
            // report them.
            let _ = unsafe { sys::cuGraphExecDestroy(lock(&self.handle).0) };
        }
    }
}
