# Read by llama.cpp's build, right after its project() (CMAKE_PROJECT_llama.cpp_INCLUDE): llama-cpp-python insists on
# llama.cpp's library for programs (arguments, chats, downloads), which it neither installs nor links to.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "llama.cpp's library for programs" FORCE)

# libmtmd's forty models are small files with the same large headers: twelve of them in one go, as llama.cpp itself does it
# with libllama's. What decodes pictures and sounds is a library of one header, which takes a minute to be made fast, and
# hetrun decodes pictures elsewhere.
function(compile_mtmd_quicker)
    if(NOT TARGET mtmd)
        return()
    endif()
    get_target_property(folder mtmd SOURCE_DIR)
    get_target_property(sources mtmd SOURCES)
    list(FILTER sources EXCLUDE REGEX "models/")
    list(TRANSFORM sources PREPEND "${folder}/")
    set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
    set_source_files_properties(${sources} DIRECTORY "${folder}" PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
        set_source_files_properties(
            "${folder}/mtmd-helper.cpp" DIRECTORY "${folder}" PROPERTIES COMPILE_OPTIONS -O1)
    endif()
endfunction()

if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.19) # DEFER
    cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL compile_mtmd_quicker)
endif()
