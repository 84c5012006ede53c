//! A folder with a model, of this program or of Hugging Face, opened alike: a recipe, and tensors by the names here.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use guildhall_comm::sizes;
use guildhall_tensor::{Device, Dtype};
use serde_json::Value;

use super::Error;
use super::families::ForeignFamily;
use super::foreign_config::{CONFIG, ForeignConfig, read_json};
use super::map::layer_among;
use crate::checkpoint::{
    self, CheckpointManifest, ElementType, FileSet, LowRankSum, OpenCheckpoint, TensorFiles, TensorKind, TensorList,
    TensorView,
};
use crate::config::{self, Config, StorageType};
use crate::data::Tokenizer;
use crate::lora::factors_of;
use crate::model::{Model, Sizes};
use crate::parallel::{Mesh, Parameters, Piece, Placement};

pub(super) const RECIPE: &str = "config.toml";
pub(super) const TOKENIZER: &str = "tokenizer.json";
pub(super) const GENERATION: &str = "generation_config.json";
/// Small files of Hugging Face's that a model keeps here, so that they are there when it goes back.
pub(super) const KEPT: [&str; 5] =
    [CONFIG, GENERATION, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];
const KEPT_BYTES_MAX: u64 = 64 << 20;

/// Whose layout a folder has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKind {
    Guildhall,
    HuggingFace,
}

/// An opened folder with a model.
#[derive(Clone, Debug)]
pub struct ModelFolder {
    pub folder: PathBuf,
    pub kind: ModelKind,
    /// The name of its family in its own layout.
    pub family: &'static str,
    pub config: Config,
    /// By the names of this program.
    pub files: Arc<TensorFiles>,
    /// What of `config.json` is lost.
    pub notices: Vec<String>,
    /// The tokenizer, and what is kept beside it: name and contents.
    pub(super) small: BTreeMap<String, Vec<u8>>,
}

impl ModelFolder {
    /// Opens a folder of either kind; that of a run stands for its newest checkpoint. Weights are those that the files
    /// have, or are read as `dtype`.
    ///
    /// # Errors
    /// A folder that is neither; what is damaged, missing, or cannot be expressed.
    pub fn open(folder: &Path, dtype: Option<StorageType>) -> Result<ModelFolder, Error> {
        match kind(folder)? {
            ModelKind::Guildhall => ModelFolder::own(folder),
            ModelKind::HuggingFace => ModelFolder::foreign(folder, dtype),
        }
    }

    fn own(folder: &Path) -> Result<ModelFolder, Error> {
        let source = checkpoint::open(folder)?;
        let path = source.file(RECIPE)?;
        let config = config::load_kept(&path, &[], None).map_err(|problems| Error::Recipe { path, problems })?.config;
        source.check_size(crate::model::count(&sizes_of(&config)).total)?;
        let files = source.files(TensorKind::Model)?;
        let small = small(&source.folder, |name| source.manifest.files.contains_key(name))?;
        let (family, notices) = (config.model.family.name(), Vec::new());
        let folder = source.folder.clone();
        let problems = differences(&expected(&config), &files.list());
        match problems.is_empty() {
            true => Ok(ModelFolder { folder, kind: ModelKind::Guildhall, family, config, files, notices, small }),
            false => Err(Error::Tensors { folder, problems }),
        }
    }

    fn foreign(folder: &Path, dtype: Option<StorageType>) -> Result<ModelFolder, Error> {
        let told = ForeignConfig::read(folder)?;
        let family = told.family;
        let set = FileSet::read_foreign(folder)?;
        let small = small(folder, |_| true)?;
        Tokenizer::check(&small[TOKENIZER], &folder.join(TOKENIZER))?;
        let object = read_json(&folder.join(CONFIG))?;
        let recipe = |dtype| {
            let name = match dtype {
                StorageType::F32 => "f32",
                StorageType::Bf16 => "bf16",
            };
            told.recipe(name, end_of_text(&object, &small))
        };
        let (config, mut notices) = recipe(dtype.unwrap_or(StorageType::Bf16))?;
        check_size(folder, &config, &set)?;
        let experts = config.moe.as_ref().map_or(1, |moe| moe.experts.smallest());
        let wrong = |problems| Error::Tensors { folder: folder.to_owned(), problems };
        let further = config.model.layers..config.model.layers.saturating_add(told.further_layers());
        let find = |config| family.find(&expected(config), experts, &set, told.packing, &further).map_err(wrong);
        let (mut config, mut views) = (config.clone(), find(&config)?);
        if dtype.is_none() && !are_narrow(&views, &set) {
            config = recipe(StorageType::F32)?.0;
            views = find(&config)?;
        }
        notices.extend(unpacked(&views));
        notices.extend(left_out(&set, &further));
        notices.extend(family.computed(&set));
        let files = TensorFiles::new(folder, set).seen(views);
        let problems = twins(family, &files)?;
        if !problems.is_empty() {
            return Err(wrong(problems));
        }
        let (kind, family, files) = (ModelKind::HuggingFace, family.model_type, Arc::new(files));
        Ok(ModelFolder { folder: folder.to_owned(), kind, family, config, files, notices, small })
    }

    /// Holds that a checkpoint that has state of the optimizer has all of it.
    ///
    /// # Errors
    /// All that is missing, strange, or of another shape.
    pub(super) fn check_state(&self) -> Result<(), Error> {
        if self.kind == ModelKind::HuggingFace {
            return Ok(());
        }
        // Opening the folder has compared all files with their checksums.
        let listed = CheckpointManifest::read(&self.folder)?.files;
        if !listed.keys().any(|name| TensorKind::Optimizer.is_of(name)) {
            return Ok(());
        }
        let state = FileSet::read(TensorKind::Optimizer, &self.folder, listed.keys())?;
        let problems = differences(&expected_state(&self.config), &TensorFiles::new(&self.folder, state).list());
        let folder = self.folder.clone();
        if problems.is_empty() { Ok(()) } else { Err(Error::Tensors { folder, problems }) }
    }

    /// The same as a checkpoint of this program, from whose weights a run can start.
    pub fn source(&self) -> Result<OpenCheckpoint, Error> {
        match self.kind {
            ModelKind::Guildhall => Ok(checkpoint::open(&self.folder)?),
            ModelKind::HuggingFace => {
                Ok(OpenCheckpoint::foreign(&self.folder, self.files.clone(), self.small.keys().cloned()))
            }
        }
    }

    /// The same without adapters, what they add being a part of the weights; how many there are.
    #[must_use]
    pub fn merged(self) -> (ModelFolder, usize) {
        let Some(lora) = self.config.lora.as_ref() else { return (self, 0) };
        let (list, scale) = (self.files.list(), lora.scale());
        let sum = |name: &String| {
            let [a, b] = factors_of(name, |factor| list.contains_key(factor))?;
            Some((name.clone(), LowRankSum { a, b, scale }))
        };
        let sums: BTreeMap<String, LowRankSum> = list.keys().filter_map(sum).collect();
        let (count, files) = (sums.len(), Arc::new((*self.files).clone().summed(sums)));
        let train = config::Training { only: None, ..self.config.train.clone() };
        (ModelFolder { files, config: Config { lora: None, train, ..self.config.clone() }, ..self }, count)
    }

    /// A small file.
    pub(super) fn small(&self, name: &str) -> Option<&Vec<u8>> {
        self.small.get(name)
    }
}

/// Whose layout a folder has.
///
/// # Errors
/// A folder of neither.
pub fn kind(folder: &Path) -> Result<ModelKind, Error> {
    let is_own = checkpoint::newest(folder)?.is_some() || folder.join("manifest.json").exists();
    // What a checkpoint keeps of Hugging Face's does not make it a model of theirs when its manifest is gone.
    let is_own = is_own || [RECIPE, CONFIG].iter().all(|name| folder.join(name).exists());
    match (is_own, folder.join(CONFIG).exists()) {
        (true, _) => Ok(ModelKind::Guildhall),
        (false, true) => Ok(ModelKind::HuggingFace),
        (false, false) => Err(Error::NotAModel { path: folder.to_owned() }),
    }
}

/// The tokenizer, without which no text is read, and what is kept of other small files.
fn small(folder: &Path, is_own: impl Fn(&str) -> bool) -> Result<BTreeMap<String, Vec<u8>>, Error> {
    let mut small = BTreeMap::new();
    for name in KEPT.into_iter().chain([TOKENIZER]) {
        let path = folder.join(name);
        if !is_own(name) || path.symlink_metadata().is_err() {
            continue;
        }
        checkpoint::check_within(folder, name)?;
        let metadata = std::fs::metadata(&path).map_err(Error::io("open", &path))?;
        if !metadata.is_file() || metadata.len() > KEPT_BYTES_MAX {
            return Err(Error::Json { path, reason: "it is no regular file of a sensible size".to_owned() });
        }
        small.insert(name.to_owned(), std::fs::read(&path).map_err(Error::io("read", &path))?);
    }
    let path = folder.join(TOKENIZER);
    match small.contains_key(TOKENIZER) {
        true => Ok(small),
        false => Err(Error::Json { path, reason: "it is missing, and text is read by no other file".to_owned() }),
    }
}

/// Whether nothing that would be bf16 here is stored in more bits, or is packed, in fewer.
fn are_narrow(views: &BTreeMap<String, TensorView>, set: &FileSet) -> bool {
    let mut narrow = views.values().filter(|view| view.dtype == ElementType::Bf16 && view.packed.is_none());
    narrow.all(|view| set.entry(&view.tensor).is_some_and(|(_, entry)| entry.dtype == ElementType::Bf16))
}

/// What of the files is in fewer bits than it has here, if anything.
fn unpacked(views: &BTreeMap<String, TensorView>) -> Option<String> {
    let packed: Vec<&TensorView> = views.values().filter(|view| view.packed.is_some()).collect();
    let first = packed.first()?;
    let how = first.packed.as_ref().map(|packed| packed.packing.name()).unwrap_or_default();
    Some(format!("{} matrices are stored in {how} and are read as {}; none is written so", packed.len(), first.dtype))
}

/// What of the files is no part of the model, if anything.
fn left_out(set: &FileSet, further: &Range<usize>) -> Option<String> {
    // Those that there are tensors of: config.json may claim any number.
    let layers: Vec<usize> = set.entries().filter_map(|(name, _)| layer_among(name, further)).collect();
    let tensors = layers.len();
    let layers: Vec<String> =
        BTreeSet::from_iter(layers).into_iter().map(|layer| format!("model.layers.{layer}")).collect();
    let layers = layers.join(", ");
    (tensors > 0).then(|| format!("{layers}: predicts further tokens and is left out, with its {tensors} tensors"))
}

/// The token that `eos_token_id` means, by the tokenizer.
fn end_of_text(object: &serde_json::Map<String, Value>, small: &BTreeMap<String, Vec<u8>>) -> Option<String> {
    let end = object.get("eos_token_id")?;
    let end = end.as_array().map_or(Some(end), |several| several.first())?.as_u64()?;
    let tokenizer: Value = serde_json::from_slice(small.get(TOKENIZER)?).ok()?;
    let added = tokenizer.get("added_tokens")?.as_array()?;
    let token = added.iter().find(|token| token["id"].as_u64() == Some(end))?;
    token["content"].as_str().map(str::to_owned)
}

/// What names and shapes of tensors follow from.
fn sizes_of(config: &Config) -> Sizes {
    let dtype = match config.train.dtype {
        StorageType::F32 => Dtype::F32,
        StorageType::Bf16 => Dtype::Bf16,
    };
    let (model, moe, lora, gradients) = (config.model.clone(), config.moe.clone(), config.lora.clone(), Dtype::F32);
    Sizes { model, moe, lora, dtype, gradients, seed: 0, frozen: Vec::new() }
}

/// A model of which there are only sizes.
fn shapes_of(sizes: &Sizes) -> Model {
    let alone = sizes::world(0, 1, Arc::new(|_, _| ()), Arc::new(|_, _| None));
    let mesh = Mesh::new(alone, 1).expect("a rank alone agrees with itself");
    Model::new(&Device::sizes(1), sizes, &mesh)
}

/// The optimizer's tensors of the recipe of a run.
fn expected_state(config: &Config) -> TensorList {
    let mut list = TensorList::new();
    shapes_of(&Sizes { frozen: config.frozen(), ..sizes_of(config) }).visit_trained(&mut |weight| {
        let strips = if weight.parameter.dtype() == Dtype::F32 { 2 } else { 3 };
        for (name, shape) in weight.placement.pieces.iter().flat_map(of_each) {
            for prefix in &["m/", "v/", "master/"][..strips] {
                list.insert(format!("{prefix}{name}"), (ElementType::F32, shape.clone()));
            }
        }
    });
    list
}

/// The tensors of the model of a recipe.
pub(super) fn expected(config: &Config) -> TensorList {
    let mut model = shapes_of(&sizes_of(config));
    let mut list = TensorList::new();
    let mut add = |placement: &Placement, dtype| {
        for (name, shape) in placement.pieces.iter().flat_map(of_each) {
            list.insert(name, (ElementType::of(dtype), shape));
        }
    };
    model.visit(&mut |weight| add(&weight.placement, weight.parameter.dtype()));
    model.visit_buffers(&mut |buffer| add(&buffer.placement, buffer.value.dtype()));
    list
}

/// The tensors that a piece stands for: where there are only sizes, one is for a whole stack of networks.
fn of_each(piece: &Piece) -> Vec<(String, Vec<usize>)> {
    const STACKS: [&str; 3] =
        [".block_sparse_moe.experts.", ".block_sparse_moe.shared_experts.", ".block_sparse_moe.mlp."];
    let own = || vec![(piece.name.clone(), piece.shape.clone())];
    let Some((stack, (layer, part))) = STACKS.iter().find_map(|stack| Some((stack, piece.name.split_once(stack)?)))
    else {
        return own();
    };
    if part.starts_with(|letter: char| letter.is_ascii_digit()) {
        return own();
    }
    let (count, shape) = piece.shape.split_first().expect("a stack has a number of networks");
    (0..*count).map(|number| (format!("{layer}{stack}{number}.{part}"), shape.to_vec())).collect()
}

/// Refuses a model that is far larger than the files, before anything is made of its sizes.
fn check_size(folder: &Path, config: &Config, set: &FileSet) -> Result<(), Error> {
    let (elements, tensors) = set.entries().fold((0, 0), |(all, n), (_, entry)| (all + entry.elements(), n + 1));
    let model = &config.model;
    let experts = config.moe.as_ref().map_or(0, |moe| moe.experts.smallest());
    let least = model.layers as u64 * experts.max(1) as u64;
    let large =
        model.layers > tensors || least > elements || model.vocab.saturating_mul(model.d_model) as u64 > elements;
    let problem = format!(
        "config.json is of {} layers, {experts} experts, {} tokens and width {}: there are {tensors} tensors with \
         {elements} elements",
        model.layers, model.vocab, model.d_model
    );
    match large {
        true => Err(Error::Tensors { folder: folder.to_owned(), problems: vec![problem] }),
        false => Ok(()),
    }
}

/// How the tensors that are there differ from those of the model.
pub(super) fn differences(model: &TensorList, there: &TensorList) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, (dtype, shape)) in model {
        match there.get(name) {
            None => problems.push(format!("{name} is missing")),
            Some((own_dtype, own)) if own != shape || own_dtype != dtype => {
                problems.push(format!("{name} is {own_dtype} {own:?}, by config.toml it is {dtype} {shape:?}"));
            }
            Some(_) => {}
        }
    }
    let strange = there.keys().filter(|name| !model.contains_key(*name));
    problems.extend(strange.map(|name| format!("{name} is no tensor of the model")));
    problems
}

/// Tensors that should repeat another, and do not.
fn twins(family: &ForeignFamily, files: &TensorFiles) -> Result<Vec<String>, Error> {
    let views = files.views().expect("a foreign folder");
    let mut problems = Vec::new();
    let stored = TensorFiles::new(files.folder(), files.set().clone());
    let used: BTreeSet<&String> = views.values().map(|view| &view.tensor).collect();
    for (name, _) in files.set().entries().filter(|(name, _)| !used.contains(name)) {
        let Some(of) = family.twin(name) else { continue };
        let tensor = &views[of].tensor;
        if stored.read(name)? != stored.read(tensor)? {
            problems.push(format!("{name} differs from {tensor}, which a tied model has in its place"));
        }
    }
    Ok(problems)
}
