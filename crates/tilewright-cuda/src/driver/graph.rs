//! Graphs: work of a stream, recorded once and launched as a whole.
//!
//! What a graph needs beyond the memory whose addresses it was given, it keeps alive: machine code of kernels, bytes of writes.

use super::{
    Context, Error, Result, Stream,
    error::driver,
    handle::{Handle, lock},
};
use cudarc::driver::sys;
use std::{ptr::null_mut, sync::Mutex};

/// Recorded work.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    handle: Handle<sys::CUgraph_st>,
    nodes: usize,
}

/// A graph that can be launched, as often as one likes.
#[derive(Debug)]
pub struct Executable {
    /// By one thread at once (CUDA driver API: graphs "are not internally synchronized").
    handle: Mutex<Handle<sys::CUgraphExec_st>>,
    graph: Graph,
}

impl Graph {
    /// What a capture made; it is current, and the graph is ours.
    pub(super) fn new(context: &Context, graph: sys::CUgraph) -> Result<Self> {
        // dropped if what follows fails
        let mut graph = Self { context: context.clone(), handle: Handle(graph), nodes: 0 };
        // SAFETY: the graph exists; without room for nodes it is only their number that is written.
        unsafe { driver!(cuGraphGetNodes(graph.handle.0, null_mut(), &mut graph.nodes)) }?;
        Ok(graph)
    }

    /// How many nodes it has: launches, copies, fills.
    pub fn num_nodes(&self) -> usize {
        self.nodes
    }

    /// Makes it fit to be launched.
    ///
    /// # Errors
    /// When the driver refuses.
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
    /// Has `stream` do the work, behind what it was asked for up to now.
    ///
    /// # Errors
    /// When the stream belongs to another GPU; when the driver refuses.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        stream.same_gpu("graph.launch", "the graph", &self.graph.context)?;
        let _current = self.graph.context.enter()?;
        let handle = lock(&self.handle);
        // SAFETY: both exist, and no other thread has the graph.
        unsafe { driver!(cuGraphLaunch(handle.0, stream.raw())) }
    }

    /// Becomes `newer`: the same work in the same order, with other arguments, grids or addresses. Cheaper than making that one fit
    /// to be launched. Launches that are under way are not touched.
    ///
    /// # Errors
    /// When the work is another; then this is as it was.
    pub fn update(&mut self, newer: Graph) -> Result<()> {
        if !newer.context.is(&self.graph.context) {
            return Err(Error::new("graph.update", "the newer graph belongs to another GPU"));
        }
        {
            let _current = self.graph.context.enter()?;
            let handle = lock(&self.handle);
            let mut info = sys::CUgraphExecUpdateResultInfo {
                result: sys::CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS,
                errorNode: null_mut(),
                errorFromNode: null_mut(),
            };
            // SAFETY: both graphs and the place exist.
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

    /// How many nodes it has.
    pub fn num_nodes(&self) -> usize {
        self.graph.nodes
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: it is ours. An error here has nobody to tell.
            let _ = unsafe { sys::cuGraphDestroy(self.handle.0) };
        }
        self.context.sweep();
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if let Ok(_current) = self.graph.context.enter() {
            // SAFETY: it is ours; launches that are under way end. An error here has nobody to tell.
            let _ = unsafe { sys::cuGraphExecDestroy(lock(&self.handle).0) };
        }
    }
}
